"""The reduction of gradients over data-parallel replicas, emulated: a link that takes its time beside compute."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.emulation.sleeping import sleep_until


@dataclass(frozen=True)
class ReductionCosts:
    """How gradients are reduced. A rank's buckets are of equal size, and each is a parameter."""

    data_parallel_size: int
    time_reduce: float
    """Milliseconds for all gradients of a rank."""
    num_buckets: int
    """Of each model chunk."""


class ReductionLink:
    """One rank's link to its replicas. It carries one bucket after the other, each once all replicas have it.

    That is agreed on by real messages, all-reduces of the time at which a replica was ready; the link's own
    time passes while the rank computes, and is waited for in `finish`.
    """

    def __init__(self, costs: ReductionCosts, num_chunks: int, replicas: dist.ProcessGroup) -> None:
        self._seconds = costs.time_reduce / costs.num_buckets / num_chunks / 1e3
        self._replicas = replicas
        self._started: list[tuple[dist.Work, torch.Tensor]] = []

    def start(self) -> None:
        """A bucket is ready on this rank."""
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
