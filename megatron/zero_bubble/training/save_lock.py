"""Keeps a second job out of the folder in which a job saves its checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from megatron.zero_bubble.job.environment import host_name

LOCK = "zero_bubble.lock"


def lock_folder(
    root: str | Path, environment: Mapping[str, str], warn: Callable[[str], None], patience: float = 10.0
) -> BinaryIO:
    """Make `root` if need be, and take it for this job: until the returned file is closed, no other job saves there.

    The system closes it when the process is gone, however it ends, so that the next job can start at once. The lock is
    one of POSIX, which belongs to the process alone: children that outlive it do not inherit it. NFS and, where mounted
    with `flock`, Lustre keep such locks across machines.

    Args:
        warn: is told if the file system has no locks.
        patience: seconds that another job has to be gone. One that is killed holds the lock until its memory is freed.

    Raises:
        ValueError: another job has taken it, or nothing can be written there.
    """
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        # This process must not open it again: to close a file once is to lose the lock.
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
    """Lock the file, unless another process has."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK):
            raise
        warn(f"  --save {root}: this file system has no locks ({error.strerror}): see that no other job saves there")
    return True


def _holder(file: BinaryIO) -> str:
    """What the job that has taken the folder says of itself."""
    file.seek(0)
    return file.read(300).decode(errors="replace").partition("\n")[0] or "another job"


def _this_job(environment: Mapping[str, str]) -> str:
    """Where this job is found, and since when it runs."""
    slurm = f"Slurm job {environment['SLURM_JOB_ID']}, " if "SLURM_JOB_ID" in environment else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{slurm}process {os.getpid()} on {host_name(environment)}, since {since},"
