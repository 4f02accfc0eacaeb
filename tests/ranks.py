"""Ranks for one job after another: processes with everything imported, which stay until their module of tests is done.

A rank that is started by torchrun imports for seconds, and a training of the tests takes less than one.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.zero_bubble.runtime.processes import tie_children

Body = Callable[..., None]
"""`body(rank, num_ranks, *arguments)`, which every rank of a job runs."""


def _serve(rank: int, num_ranks: int, orders: Connection) -> None:
    """Be a rank: run each body that is ordered, and say so when it is done. An error ends the process."""
    # A process of a fork server would start its loader workers by one of its own, which import everything again.
    multiprocessing.set_start_method(None, force=True)
    tie_children()  # as a job's ranks do: the loader workers of a rank that is killed end with it
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            body, arguments = orders.recv()
            body(rank, num_ranks, *arguments)
            orders.send("done")


class Ranks:
    """Processes that run one body after another."""

    def __init__(self, num_ranks: int) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.rank_imports"])
        self._orders: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, theirs))
            process.start()
            theirs.close()
            self._orders.append(ours)
            self._processes.append(process)

    @property
    def are_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, body: Body, arguments: tuple[object, ...], timeout: float) -> int | None:
        """Run a body on all ranks. If one fails, or time runs out, all are killed.

        Returns:
            0, the exit status of the first rank that failed, or None if time ran out after `timeout` seconds.
        """
        status: int | None = 0
        try:
            for orders in self._orders:
                orders.send((body, arguments))
            status = self._wait(time.monotonic() + timeout)
        except BrokenPipeError:  # a rank has died since the last body
            status = self._exit_status()
        if status != 0:
            self.close()
        return status

    def _wait(self, deadline: float) -> int | None:
        running = list(self._orders)
        while running:
            ready = multiprocessing.connection.wait(running, max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            for orders in ready:
                try:
                    assert orders.recv() == "done"  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    return self._exit_status()
                running.remove(orders)  # type: ignore[arg-type]
        return 0

    def _exit_status(self) -> int:
        """The exit status of a rank that has ended. A killed rank goes before others, which may fail because of it."""
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        statuses = []
        for process in self._processes:
            if process.sentinel in ended:
                process.join()
                statuses.append(process.exitcode or 1)
        return min(statuses)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for orders in self._orders:
            orders.close()


_started: dict[int, Ranks] = {}
"""The ranks of this module of tests, by their number."""


def run_on_ranks(num_ranks: int, body: Body, arguments: tuple[object, ...], timeout: float) -> int | None:
    """Run a body on the ranks of this module of tests, which are started if they are not there: see `Ranks.run`."""
    ranks = _started.get(num_ranks)
    if ranks is None or not ranks.are_alive:
        ranks = _started[num_ranks] = Ranks(num_ranks)
    return ranks.run(body, arguments, timeout)


def be_rank(rank: int, num_ranks: int) -> None:
    """Give this process the environment in which torchrun would start it."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in places.items()})


def append_output(files: Sequence[Path]) -> None:
    """Append this process's output to the first file, and its errors to the second."""
    for stream, path in zip((sys.stdout, sys.stderr), files, strict=True):
        stream.flush()
        with path.open("a") as file:
            os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@atexit.register
def close_ranks() -> None:
    """End all ranks. `tests/conftest.py` calls it after each module."""
    while _started:
        _started.popitem()[1].close()
