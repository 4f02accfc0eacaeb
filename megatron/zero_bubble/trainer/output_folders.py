"""Checks that the places of output can be written, and locks the folder in which a job saves checkpoints."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from megatron.zero_bubble.session.environment import host_name
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.trainer.arguments import Arguments

_FOLDERS = ("save", "tensorboard_dir", "zero_bubble_timeline")
_FILES = ("log_numerics", "zero_bubble_profile_output", "zero_bubble_unit_costs_output")


def check_output(args: Arguments) -> None:
    """Check the flags for output, and try to write in the folders that they name.

    Raises:
        ValueError: flags contradict each other, or a place cannot be written; the message names the flag and why.
    """
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other"
        )
    if args.save is None and args.save_interval is not None:
        raise ValueError("--save-interval needs --save FOLDER")
    if args.save is not None and importlib.util.find_spec("psutil") is None:
        raise ValueError(
            f"--save {args.save}: megatron-core writes checkpoints only where the package psutil is installed"
        )
    for name in _FOLDERS:
        folder = getattr(args, name)
        if folder is not None:
            existing = _nearest_existing(Path(folder))
            if not existing.is_dir():
                raise ValueError(f"{flag_name(name)} {folder}: {existing} is not a folder")
            _check_writable(f"{flag_name(name)} {folder}", existing)
    for name in _FILES:
        value = getattr(args, name)
        if value is not None:
            file = Path(value).absolute()
            if not file.parent.is_dir():
                raise ValueError(f"{flag_name(name)} {value}: its folder does not exist")
            if file.is_dir():
                raise ValueError(f"{flag_name(name)} {value} is a folder; name a file")
            _check_writable(f"{flag_name(name)} {value}", _nearest_existing(file))


def _nearest_existing(path: Path) -> Path:
    """The file or folder itself if it exists, else the nearest folder above it that does."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.exists(place))


def _check_writable(flag: str, place: Path) -> None:
    """Raise `ValueError` unless a folder can be made in `place`: permissions do not show a full file system."""
    permissions = os.W_OK | os.X_OK if place.is_dir() else os.W_OK
    if not os.access(place, permissions):
        raise ValueError(f"{flag}: this user may not write to {place}: choose another place")
    if not place.is_dir():
        return
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=place))
    except OSError as error:
        raise ValueError(f"{flag}: nothing can be made in {place} ({error.strerror}): choose another place") from error


LOCK = "zero_bubble.lock"


def lock_folder(
    root: str | Path, environment: Mapping[str, str], warn: Callable[[str], None], patience: float = 10.0
) -> BinaryIO:
    """Create the folder `root` if needed, and lock it for this job until the returned file is closed.

    The system closes the file when the process ends in any way, so that the next job can start at once. The lock is a
    POSIX lock: it belongs to the process alone, and children that outlive it do not inherit it. NFS and, where mounted
    with `flock`, Lustre keep such locks across machines.

    Args:
        warn: called with a line if the file system has no locks.
        patience: seconds to wait for the lock: a job that is killed holds it until its memory is freed.

    Raises:
        ValueError: another job holds the lock, or the folder cannot be written.
    """
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        # This process must not open the file again: closing any descriptor of a file releases its POSIX locks.
        file = open(Path(root) / LOCK, "a+b", buffering=0)  # noqa: SIM115
        deadline = time.monotonic() + patience
        while not _take(file, root, warn):
            if time.monotonic() >= deadline:
                file.seek(0)
                holder = file.read(300).decode(errors="replace").partition("\n")[0] or "another job"
                raise ValueError(f"--save {root}: {holder} saves there: let it end, or choose another folder")
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"{_this_job(environment)}\n".encode())
    except OSError as error:
        raise ValueError(f"--save {root}: {LOCK} cannot be written there: {error.strerror}") from error
    return file


def _take(file: BinaryIO, root: str | Path, warn: Callable[[str], None]) -> bool:
    """Try to lock the file; return False if another process holds the lock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK):
            raise
        warn(f"  --save {root}: this file system has no locks ({error.strerror}): ensure that no other job saves there")
    return True


def _this_job(environment: Mapping[str, str]) -> str:
    """A description of this job: its Slurm job, process and host, and when it started."""
    slurm = f"Slurm job {environment['SLURM_JOB_ID']}, " if "SLURM_JOB_ID" in environment else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{slurm}process {os.getpid()} on {host_name(environment)}, since {since},"
