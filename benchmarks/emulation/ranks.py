"""Starts the ranks of an emulated run and gathers their records."""

from __future__ import annotations

import json
import multiprocessing
import signal
import tempfile
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path

import torch.multiprocessing

from benchmarks.emulation.worker import EmulatedJob, StepRecord, run_rank


@dataclass(frozen=True)
class Records:
    """Everything that the ranks of an emulated run measured."""

    steps: dict[str, list[list[StepRecord]]]
    """By contestant, the records of all ranks for every iteration of every step."""
    refused: dict[str, str]
    """By peer that does not run at these sizes, the reason."""
    orders: dict[str, list[list[str]]]
    """By peer, the actions of every rank in order."""
    edges: dict[str, list[dict[int, float]]]
    """By schedule of ours, the milliseconds of a message over each edge of every rank."""
    gathers: list[float]
    """Seconds that rank 0 needed each time to gather the bubble rate."""
    reductions: list[float]
    """Seconds of the optimizer's reduction, each time on the rank where it took longest."""


def run_job(job: EmulatedJob) -> Records:
    """Run `job` on processes of its own, one a rank, and return what they measured; raises what a rank raised."""
    with tempfile.TemporaryDirectory() as directory:
        job = replace(job, directory=Path(directory))
        # The server imports torch once and forks every rank, because an import in each rank would take long.
        multiprocessing.set_forkserver_preload(["torch.distributed.pipelining"])
        _start_server_deaf_to_interrupts()
        torch.multiprocessing.start_processes(
            run_rank, args=(job,), nprocs=job.world_size, start_method="forkserver", daemon=True
        )
        return _gather([json.loads((job.directory / f"rank{rank}.json").read_text()) for rank in range(job.world_size)])


def _start_server_deaf_to_interrupts() -> None:
    """Start the server so that it and its ranks ignore Ctrl-C: this process ends them, and they print nothing."""
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
