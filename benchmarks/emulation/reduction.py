"""Emulates the reduction of gradients over data-parallel replicas, which overlaps with the computation of the rank."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.emulation.sleeping import sleep_until


@dataclass(frozen=True)
class ReductionCosts:
    """The costs of the emulated reduction; the buckets of a rank have equal sizes, with one parameter each."""

    data_parallel_size: int
    time_reduce: float
    """Milliseconds to reduce all gradients of a rank."""
    num_buckets: int
    """Number of buckets of each model chunk."""


class ReductionLink:
    """A rank's link to its replicas, which reduces one bucket at a time, when the bucket is ready on all replicas.

    A real all-reduce over the replicas computes when a bucket is ready on all of them. The time of the reduction passes
    while the rank computes; `finish` waits for the remaining time.
    """

    def __init__(self, costs: ReductionCosts, num_chunks: int, replicas: dist.ProcessGroup) -> None:
        self._seconds = costs.time_reduce / costs.num_buckets / num_chunks / 1e3
        self._replicas = replicas
        self._started: list[tuple[dist.Work, torch.Tensor]] = []

    def start(self) -> None:
        """Start the reduction of the next bucket, whose gradients are now complete on this rank."""
        ready = torch.tensor([time.perf_counter()], dtype=torch.float64)
        work = dist.all_reduce(ready, op=dist.ReduceOp.MAX, group=self._replicas, async_op=True)
        self._started.append((work, ready))

    def finish(self) -> None:
        """Wait until every bucket is reduced."""
        end = 0.0
        for work, ready in self._started:
            work.wait()
            end = max(end, ready.item()) + self._seconds
        self._started = []
        sleep_until(end)
