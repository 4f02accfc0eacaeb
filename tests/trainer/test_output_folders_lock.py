"""Two jobs do not save to one folder; a job that is gone does not keep the next one out."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatron.zero_bubble.trainer.output_folders import LOCK, lock_folder

HELD_BY_SLURM = {"SLURM_JOB_ID": "4711", "SLURMD_NODENAME": "node-7"}
FORK = multiprocessing.get_context("fork")
"""Starts processes that need not import anything."""


def hold(folder: Path, pids: Connection) -> None:
    """Hold `folder`, and send the process id of a child that has inherited all files."""
    file = lock_folder(folder, HELD_BY_SLURM, print, patience=0.2)
    child = os.fork()
    if child == 0:
        time.sleep(600)  # as a loader worker that outlives its rank
        os._exit(0)
    pids.send(child)
    time.sleep(600)
    file.close()


def lock_and_close(folder: Path) -> None:
    lock_folder(folder, {}, print, patience=0.2).close()


def lock_elsewhere(folder: Path) -> None:
    """Lock the folder in another process. An error of that process is raised here."""
    with ProcessPoolExecutor(1, FORK) as pool:
        pool.submit(lock_and_close, folder).result()


class Holder:
    """Another process that has taken `folder`, with a child that inherited all of its files."""

    def __init__(self, folder: Path) -> None:
        pids, theirs = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=hold, args=(folder, theirs))
        self.process.start()
        theirs.close()
        self.pid, self.child = self.process.pid, pids.recv()

    def kill(self) -> None:
        """Kill the process, and leave its child behind."""
        self.process.kill()
        self.process.join()


@pytest.fixture
def holder(tmp_path):
    holder = Holder(tmp_path / "checkpoints")
    yield holder
    holder.kill()
    os.kill(holder.child, signal.SIGKILL)


def lock(folder: Path, patience: float = 60.0):
    return lock_folder(folder, {}, pytest.fail, patience)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        lock(folder, patience=0.2)
    return str(error.value)


def test_the_other_job_is_named(tmp_path, holder):
    folder = tmp_path / "checkpoints"
    line = refusal(folder)
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", line) == (
        f"--save {folder}: Slurm job 4711, process {holder.pid} on node-7, since TIME, saves there: "
        "let it end, or choose another folder"
    )
    assert refusal(folder) == line, "a refused job must not change what the next one is told"


def test_a_job_that_is_ending_is_waited_for(tmp_path, holder):
    """A process that is killed lives on until its memory is freed, and all the while it holds its locks."""
    threading.Timer(0.5, holder.kill).start()
    lock(tmp_path / "checkpoints").close()


def test_a_killed_job_does_not_keep_the_next_one_out(tmp_path, holder):
    """The lock is free although a child of the killed process lives on, with all files that were open."""
    holder.kill()
    os.kill(holder.child, 0)
    lock(tmp_path / "checkpoints").close()


@pytest.fixture
def done(tmp_path):
    """A job that held the folder before the holder."""
    lock(tmp_path / "checkpoints").close()


def test_a_folder_whose_job_is_done_can_be_locked_by_the_next_one_which_is_then_named(tmp_path, done, holder):
    assert f"process {holder.pid} on node-7" in refusal(tmp_path / "checkpoints")


def test_closing_frees_the_folder(tmp_path):
    file = lock(tmp_path)
    with pytest.raises(ValueError, match=f"process {os.getpid()} on "):
        lock_elsewhere(tmp_path)
    file.close()
    lock_elsewhere(tmp_path)


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch):
    def refuse(*unused: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    warnings: list[str] = []
    lock_folder(tmp_path, {}, warnings.append).close()
    assert warnings == [
        f"  --save {tmp_path}: this file system has no locks (Function not implemented): "
        "ensure that no other job saves there"
    ]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file" / "checkpoints") == (
        f"--save {tmp_path}/file/checkpoints: {LOCK} cannot be written there: Not a directory"
    )
