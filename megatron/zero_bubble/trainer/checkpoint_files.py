"""Names and checks the files of a checkpoint, and updates the tracker file, which names the latest checkpoint.

The trainer writes the checkpoint of iteration 100 to `iter_0000100.incomplete/`. When every file of the checkpoint is
on disk, the trainer removes `.incomplete` from the folder's name, and then replaces the tracker file
`latest_checkpointed_iteration.txt`. Both the renaming of the checkpoint's folder and the replacement of the tracker
file are atomic. A killed process, a crash or a full disk can leave an incomplete checkpoint. The folder name of an
incomplete checkpoint still ends with `.incomplete`, and the tracker file does not name this checkpoint. The trainer
never loads an incomplete checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megatron.zero_bubble.mcore.checkpoint_reading import (
    COMMON_FILE,
    CheckpointError,
    extents,
    read_common,
    read_metadata,
)
from megatron.zero_bubble.session.files import write_file

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "metadata.json"
_INCOMPLETE = ".incomplete"
_REPLACED = ".replaced"


def checkpoint_folder(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def tracked(root: str | Path) -> str:
    """Return the text of the tracker file under `root`; "none" if there is no such file.

    Raises:
        CheckpointError: the tracker file cannot be read.
    """
    try:
        return (Path(root) / TRACKER).read_text(errors="replace").strip()[:40]
    except (FileNotFoundError, NotADirectoryError):
        return "none"
    except OSError as error:
        raise CheckpointError(f"{TRACKER} cannot be read: {error.strerror}") from error


def latest_iteration(root: str | Path) -> int:
    """Return the iteration of the complete checkpoint that the tracker file under `root` names.

    Raises:
        ValueError: there is no tracker file, or the tracker file does not name a complete checkpoint.
    """
    try:
        return _tracked_iteration(Path(root))
    except CheckpointError as error:
        raise ValueError(f"--load {root}: {error}{_complete_iterations(root)}") from error


def _tracked_iteration(root: Path) -> int:
    """Return the iteration in the tracker file; raise `CheckpointError` unless its checkpoint is complete."""
    text = tracked(root)
    if text == "none":
        is_inside = (root.parent / TRACKER).is_file()
        remedy = f"; give {root.parent}, whose {TRACKER} names the iteration to load" if is_inside else ""
        raise CheckpointError(f"no checkpoint there ({TRACKER} is missing){remedy}")
    if not text.isdecimal():
        raise CheckpointError(f"{TRACKER} says {text!r}, which is not an iteration")
    folder = checkpoint_folder(root, int(text))
    if not folder.is_dir():
        raise CheckpointError(f"{folder.name}, which {TRACKER} names, is missing")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder.name}, which {TRACKER} names, is incomplete: {CONFIG} is missing")
    return int(text)


def _complete_iterations(root: str | Path) -> str:
    """Text with the iterations of the complete checkpoints under `root`; empty if there are none."""
    names = sorted(file.parent.name.removeprefix("iter_") for file in Path(root).glob(f"iter_*/{CONFIG}"))
    iterations = ", ".join(str(int(name)) for name in names if name.isdecimal())
    return f"; write the iteration to load into {TRACKER}: {iterations}" if iterations else ""


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Add `--load` and the checkpoint's folder to the message of a `CheckpointError` in the `with` block."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"--load {folder.parent}: {folder.name}: {error}") from error


def check_config(folder: Path) -> None:
    """Raise `CheckpointError` unless `metadata.json` in `folder` says that the checkpoint has torch_dist format."""
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
    """Create an empty folder for the checkpoint of `iteration`, and remove the folders of earlier saves that failed."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in (*root.glob(f"iter_*{_INCOMPLETE}"), *root.glob(f"iter_*{_REPLACED}")):
        shutil.rmtree(leftover)
    folder = incomplete_folder(root, iteration)
    folder.mkdir()
    return folder


def incomplete_folder(root: Path, iteration: int) -> Path:
    """Return the path of the folder that holds the unfinished checkpoint of iteration `iteration`."""
    final = checkpoint_folder(root, iteration)
    return final.with_name(final.name + _INCOMPLETE)


def name_latest(root: Path, iteration: int) -> None:
    """Rename the complete checkpoint's folder to its final name, and write `iteration` to the tracker file."""
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


def read_checked(folder: Path, needed: Iterable[str]) -> tuple[Metadata, dict[str, Any]]:
    """Check a checkpoint's files, and read the checkpoint's metadata and the part that is common to all ranks.

    Args:
        needed: keys that the part that is common to all ranks must contain.

    Raises:
        CheckpointError: a file is missing, truncated or of another format, or the part that is common to all ranks
            lacks a key of `needed`.
    """
    check_config(folder)
    description = read_metadata(folder)
    check_complete(folder, description)
    common = read_common(folder)
    for name in needed:
        if name not in common:
            raise CheckpointError(f"{COMMON_FILE} has no {name!r}")
    return description, common


def check_complete(folder: Path, description: Metadata) -> None:
    """Raise `CheckpointError` if a file with a checkpoint's tensors is missing or too short."""
    for name, num_bytes in extents(description).items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(f"{name} is missing, expected {num_bytes} bytes") from error
        if size < num_bytes:
            raise CheckpointError(f"{name} has {size} bytes, expected at least {num_bytes}")


def _sync(path: Path) -> None:
    """Wait until the contents of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
