"""Names and checks the files of a checkpoint, and keeps the tracker file that names the latest one.

A checkpoint is written to `iter_0000100.incomplete/`. When every file is on the disk, the folder gets its final name,
and then `latest_checkpointed_iteration.txt` its new number, each in one step. A checkpoint that was cut short by a
kill, a crash or a full disk is therefore never loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from megatron.zero_bubble.mcore.checkpoint_reading import COMMON_FILE, METADATA_FILE, CheckpointError, extents
from megatron.zero_bubble.session.files import write_file

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
CONFIG = "metadata.json"
_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"
_CHUNK_BYTES = 1 << 20


class Checksum(NamedTuple):
    """Size and CRC-32 of a file. CRC-32 detects damage by disks, networks and copies, at the speed of memory."""

    bytes: int
    crc32: str


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def tracked(root: str | Path) -> str:
    """The text of the tracker file under `root`; "none" if there is no such file."""
    tracker = Path(root) / TRACKER
    return tracker.read_text(errors="replace").strip()[:40] if tracker.is_file() else "none"


def latest_iteration(root: str | Path) -> int:
    """The iteration of the newest complete checkpoint under `root`.

    Raises:
        ValueError: there is no tracker file, or it does not name a complete checkpoint.
    """
    if not (Path(root) / TRACKER).is_file():
        raise ValueError(f"--load {root}: no checkpoint there ({TRACKER} is missing)")
    text = tracked(root)
    if not text.isdecimal():
        raise ValueError(f"--load {root}: {TRACKER} says {text!r}, which is not an iteration")
    folder = checkpoint_folder(root, int(text))
    if not folder.is_dir():
        raise ValueError(f"--load {root}: {folder.name}, which {TRACKER} names, is missing")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"--load {root}: {folder.name}, which {TRACKER} names, is incomplete: {CONFIG} is missing")
    return int(text)


def check_config(folder: Path) -> None:
    """Raise `CheckpointError` unless `metadata.json` says that the folder holds a checkpoint in torch_dist format."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        saved_format = (config["sharded_backend"], config["sharded_backend_version"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{CONFIG} cannot be read: {error}") from error
    if saved_format != ("torch_dist", 1):
        raise CheckpointError(
            f"{CONFIG} says format {saved_format[0]}, version {saved_format[1]}, expected torch_dist, version 1"
        )


def begin_folder(root: Path, iteration: int) -> Path:
    """Create an empty folder for the checkpoint of `iteration`, and remove what failed saves left under `root`."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in (*root.glob(f"iter_*{_INCOMPLETE}"), *root.glob(f"iter_*{_REPLACED}")):
        shutil.rmtree(leftover)
    folder = incomplete_folder(root, iteration)
    folder.mkdir()
    return folder


def incomplete_folder(root: Path, iteration: int) -> Path:
    """The folder to which the checkpoint of `iteration` is written before it is complete."""
    final = checkpoint_folder(root, iteration)
    return final.with_name(final.name + _INCOMPLETE)


def name_latest(root: Path, iteration: int) -> None:
    """Give the complete folder of `iteration` its final name, and make it the latest checkpoint under `root`."""
    folder, final = incomplete_folder(root, iteration), checkpoint_folder(root, iteration)
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        os.rename(final, replaced)
    os.rename(folder, final)
    _sync(root)
    write_file(root / TRACKER, str(iteration))
    shutil.rmtree(replaced, ignore_errors=True)


def checksum(path: Path) -> Checksum:
    """Size and CRC-32 of a file."""
    size = crc = 0
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
            crc = zlib.crc32(view[:count], crc)
    return Checksum(size, f"{crc:08x}")


def write_checksums(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    """Write the checksums of all files of a checkpoint to a file in its folder."""
    files = {name: checksums[name]._asdict() for name in _in_order_of_ranks(checksums)}
    write_file(folder / CHECKSUMS, json.dumps(files, indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, Checksum] | None:
    """The checksums that were saved with a checkpoint; None if none were saved.

    Raises:
        CheckpointError: the file of checksums cannot be read.
    """
    try:
        files = json.loads((folder / CHECKSUMS).read_text())
        return {Path(name).name: Checksum(int(file["bytes"]), str(file["crc32"])) for name, file in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{CHECKSUMS} cannot be read: {error}") from error


def check_checksums(folder: Path, expected: Mapping[str, Checksum]) -> None:
    """Raise `CheckpointError` unless the files of a checkpoint have the `expected` sizes and checksums."""
    for name, saved in expected.items():
        check_size(folder / name, saved.bytes)
        actual = checksum(folder / name)
        if actual != saved:
            raise CheckpointError(
                f"{name} is damaged: its CRC-32 is {actual.crc32}, that of what was saved {saved.crc32}"
            )


def check_size(path: Path, num_bytes: int, *, at_least: bool = False) -> None:
    """Raise `CheckpointError` unless a file has `num_bytes` bytes, or with `at_least` that many or more."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing, expected {num_bytes} bytes") from error
    if size < num_bytes or (size > num_bytes and not at_least):
        raise CheckpointError(f"{path.name} has {size} bytes, expected {'at least ' if at_least else ''}{num_bytes}")


def check_complete(folder: Path, description: Metadata, checksums: Mapping[str, Checksum] | None) -> None:
    """Raise `CheckpointError` unless every file of a checkpoint exists, is long enough, and is in `checksums`."""
    for name, num_bytes in extents(description).items():
        if checksums is not None and name not in checksums:
            raise CheckpointError(f"{CHECKSUMS} says nothing of {name}")
        check_size(folder / name, num_bytes, at_least=True)


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Names of the files that `rank` wrote to `folder`."""
    shards = [path.name for path in folder.glob(f"__{rank}_*.distcp")]
    others = [CONFIG, COMMON_FILE, METADATA_FILE] if rank == 0 else []
    return shards + [name for name in others if (folder / name).exists()]


def share(names: Collection[str], rank: int, num_ranks: int) -> list[str]:
    """The files that `rank` of the `num_ranks` loading ranks has to check.

    Shards are divided evenly. If as many ranks load as saved, each checks its own shards, which may still be in its
    host's memory. Rank 0 checks the other files, which are small.
    """
    shards = _in_order_of_ranks(name for name in names if name.startswith("__"))
    others = [name for name in names if not name.startswith("__")] if rank == 0 else []
    return others + [name for index, name in enumerate(shards) if index * num_ranks // len(shards) == rank]


def _in_order_of_ranks(names: Iterable[str]) -> list[str]:
    """Sort file names by rank, so that `__2_0.distcp` comes before `__10_0.distcp`."""
    return sorted(names, key=lambda name: (len(name), name))


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
