"""Watches a whole job, from its launcher to the last process that any rank has started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.launch import environment

_MARK = "MEGATRON_ZERO_BUBBLE_TEST_JOB"
"""An environment variable that every process of a job inherits, orphans too."""


class Job:
    """A command and all processes that it leads to. Its output goes to files, which orphans cannot keep open."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._id = uuid.uuid4().hex
        self._files = folder / f"{self._id}.out", folder / f"{self._id}.err"
        with open(self._files[0], "w") as out, open(self._files[1], "w") as err:
            self.launcher = subprocess.Popen(
                command, env={**environment(), _MARK: self._id}, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self._files[0].read_text()

    @property
    def errors(self) -> str:
        return self._files[1].read_text()

    def processes(self) -> list[psutil.Process]:
        """Every living process of the job."""
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._id:
                    living.append(process)
        return living

    def ranks(self) -> list[psutil.Process]:
        """The launcher's children, in the order of ranks."""
        children: dict[int, psutil.Process] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError, KeyError):  # it may end meanwhile
                if process.ppid() == self.launcher.pid:
                    children[int(process.environ()["RANK"])] = process
        return [children[rank] for rank in sorted(children)]

    def wait_until(self, condition: Callable[[], bool], timeout: float = 600.0) -> None:
        """Return once `condition` holds or the job has ended."""
        deadline = time.monotonic() + timeout
        while not condition() and self.launcher.poll() is None:
            assert time.monotonic() < deadline, f"too slow: {self.output[-2000:]}{self.errors[-2000:]}"
            time.sleep(0.01)

    def wait_for_iteration(self, number: int) -> None:
        self.wait_until(lambda: f"iteration {number:8d}/" in self.output)

    def end(self, timeout: float) -> tuple[int, list[str], float]:
        """Wait for the job to be gone; afterwards it is, if need be by force.

        Returns:
            The launcher's exit status, the command lines of what was still there when `timeout` was over, and the
            seconds that the launcher and all other processes took.
        """
        start = time.monotonic()
        deadline = start + timeout
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(timeout)
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        seconds = time.monotonic() - start
        commands = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                commands.append(f"{process.pid} {' '.join(process.cmdline())[-200:]}")
                process.kill()
        return self.launcher.wait(), commands, seconds


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        os.kill(process.pid, 9)
