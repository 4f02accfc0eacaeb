"""Starts the ranks of an emulated run, and gathers the measurements of all ranks."""

from __future__ import annotations

import json
import multiprocessing
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path

import torch.multiprocessing

from benchmarks.emulation.worker import EmulatedJob, StepRecord, run_rank


@dataclass(frozen=True)
class Records:
    """All measurements of the ranks of an emulated run."""

    steps: dict[str, list[list[StepRecord]]]
    """Schedule or peer -> records of all ranks, for every iteration of every step."""
    refused: dict[str, str]
    """Peer that cannot run with the given sizes -> reason."""
    orders: dict[str, list[list[str]]]
    """Peer -> actions of every rank in order."""
    edges: dict[str, list[dict[int, float]]]
    """Schedule of this project -> rank -> {s: milliseconds of a message between stages s and s + 1}."""
    gathers: list[float]
    """Seconds that rank 0 needed to gather the bubble rate, for each repetition."""
    reductions: list[float]
    """Seconds of the optimizer's reduction on the rank that took longest, for each repetition."""


def run_job(job: EmulatedJob) -> Records:
    """Run `job` in one process for each rank, and return the measurements; an error of a rank is raised again here."""
    with tempfile.TemporaryDirectory() as directory:
        job = replace(job, directory=Path(directory))
        # The server imports torch once and forks every rank, because an import in each rank would take long.
        multiprocessing.set_forkserver_preload(["torch.distributed.pipelining"])
        with _interrupts_held_back():
            _start_server_deaf_to_interrupts()
            ranks = torch.multiprocessing.start_processes(
                run_rank, args=(job,), nprocs=job.world_size, start_method="forkserver", daemon=True, join=False
            )
        while not ranks.join():
            pass
        return _gather([json.loads((job.directory / f"rank{rank}.json").read_text()) for rank in range(job.world_size)])


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Put Ctrl-C off until all ranks are started: a rank that this process does not know yet would outlive it."""
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        signal.raise_signal(signal.SIGINT)


def _start_server_deaf_to_interrupts() -> None:
    """Start the fork server so that it and the ranks ignore Ctrl-C: this process ends the ranks without output."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def _gather(reports: list[dict]) -> Records:
    steps: dict[str, list[list[StepRecord]]] = {}
    for ranks in zip(*(report["steps"] for report in reports), strict=True):
        records = [StepRecord(**record) for record in ranks]
        assert len({record.contestant for record in records}) == 1, "the ranks ran different steps"
        steps.setdefault(records[0].contestant, []).append(records)
    edges = {
        name: [{int(edge): time for edge, time in report["edges"][name].items()} for report in reports]
        for name in reports[0]["edges"]
    }
    reductions = [max(ranks) for ranks in zip(*(report["reductions"] for report in reports), strict=True)]
    return Records(steps, reports[0]["refused"], reports[0]["orders"], edges, reports[0]["gathers"], reductions)
