"""Locks the folder in which a job saves checkpoints, so that no second job saves there."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from megatron.zero_bubble.session.environment import host_name

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
                raise ValueError(f"--save {root}: {_holder(file)} saves there: let it end, or choose another folder")
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


def _holder(file: BinaryIO) -> str:
    """The line with which the job that holds the lock describes itself."""
    file.seek(0)
    return file.read(300).decode(errors="replace").partition("\n")[0] or "another job"


def _this_job(environment: Mapping[str, str]) -> str:
    """A description of this job: its Slurm job, process and host, and when it started."""
    slurm = f"Slurm job {environment['SLURM_JOB_ID']}, " if "SLURM_JOB_ID" in environment else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{slurm}process {os.getpid()} on {host_name(environment)}, since {since},"
