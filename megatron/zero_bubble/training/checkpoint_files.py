"""The files of a checkpoint: their names, their checksums, and the one that names the latest checkpoint.

A checkpoint is written to `iter_0000100.incomplete/`. Only when every file is there, and on the disk, does the folder
get its name, and then `latest_checkpointed_iteration.txt` its new number, each in one step: what was cut short, by a
kill, a crash or a full disk, is never picked up.
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

from megatron.zero_bubble.job.files import write_file
from megatron.zero_bubble.mcore.checkpoint_reading import COMMON_FILE, METADATA_FILE, CheckpointError, extents

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
CONFIG = "metadata.json"
_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"
_CHUNK_BYTES = 1 << 20


class Checksum(NamedTuple):
    """What tells a damaged file. CRC-32 finds what disks, networks and copies do to one, at the speed of memory."""

    bytes: int
    crc32: str


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def tracked(root: str | Path) -> str:
    """What the tracker file under `root` says; "none" where there is no such file."""
    tracker = Path(root) / TRACKER
    return tracker.read_text(errors="replace").strip()[:40] if tracker.is_file() else "none"


def latest_iteration(root: str | Path) -> int:
    """The iteration of the newest complete checkpoint under `root`.

    Raises:
        ValueError: there is none, or what the tracker file names is not there.
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
        found = (config["sharded_backend"], config["sharded_backend_version"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{CONFIG} cannot be read: {error}") from error
    if found != ("torch_dist", 1):
        raise CheckpointError(f"{CONFIG} says format {found[0]}, version {found[1]}, expected torch_dist, version 1")


def begin_folder(root: Path, iteration: int) -> Path:
    """An empty folder to write the checkpoint of `iteration` to. What earlier attempts left under `root` is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in (*root.glob(f"iter_*{_INCOMPLETE}"), *root.glob(f"iter_*{_REPLACED}")):
        shutil.rmtree(leftover)
    folder = incomplete_folder(root, iteration)
    folder.mkdir()
    return folder


def incomplete_folder(root: Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` is written."""
    final = checkpoint_folder(root, iteration)
    return final.with_name(final.name + _INCOMPLETE)


def name_latest(root: Path, iteration: int) -> None:
    """Give the complete folder of `iteration` its name, and make it the latest checkpoint under `root`."""
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
    """Leave the checksums of all files of a checkpoint beside them."""
    files = {name: checksums[name]._asdict() for name in _in_order_of_ranks(checksums)}
    write_file(folder / CHECKSUMS, json.dumps(files, indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, Checksum] | None:
    """The checksums that were saved with a checkpoint; None where there are none.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        files = json.loads((folder / CHECKSUMS).read_text())
        return {Path(name).name: Checksum(int(file["bytes"]), str(file["crc32"])) for name, file in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{CHECKSUMS} cannot be read: {error}") from error


def check_checksums(folder: Path, expected: Mapping[str, Checksum]) -> None:
    """Raise `CheckpointError` unless these files of a checkpoint are what was saved."""
    for name, saved in expected.items():
        check_size(folder / name, saved.bytes)
        found = checksum(folder / name)
        if found != saved:
            raise CheckpointError(
                f"{name} is damaged: its CRC-32 is {found.crc32}, that of what was saved {saved.crc32}"
            )


def check_size(path: Path, num_bytes: int, *, at_least: bool = False) -> None:
    """Raise `CheckpointError` unless the file has this many bytes, or at least as many."""
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing, expected {num_bytes} bytes") from error
    if found < num_bytes or (found > num_bytes and not at_least):
        raise CheckpointError(f"{path.name} has {found} bytes, expected {'at least ' if at_least else ''}{num_bytes}")


def check_complete(folder: Path, description: Metadata, checksums: Mapping[str, Checksum] | None) -> None:
    """Raise `CheckpointError` unless every file that the checkpoint consists of is there, long enough, and listed."""
    for name, num_bytes in extents(description).items():
        if checksums is not None and name not in checksums:
            raise CheckpointError(f"{CHECKSUMS} says nothing of {name}")
        check_size(folder / name, num_bytes, at_least=True)


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """The files that `rank` has written to `folder`."""
    shards = [path.name for path in folder.glob(f"__{rank}_*.distcp")]
    return shards + ([CONFIG, COMMON_FILE, METADATA_FILE] if rank == 0 else [])


def share(names: Collection[str], rank: int, num_ranks: int) -> list[str]:
    """The files that `rank` of those that load has to check.

    Of the shards each rank gets as many as the next, those that it wrote if as many ranks load as have saved: it may
    still have them in memory. The rest is small.
    """
    shards = _in_order_of_ranks(name for name in names if name.startswith("__"))
    others = [name for name in names if not name.startswith("__")] if rank == 0 else []
    return others + [name for index, name in enumerate(shards) if index * num_ranks // len(shards) == rank]


def _in_order_of_ranks(names: Iterable[str]) -> list[str]:
    """`__2_0.distcp` before `__10_0.distcp`: the files of one rank stand together."""
    return sorted(names, key=lambda name: (len(name), name))


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
