"""Emulates the reduction of gradients over data-parallel replicas, on a link that works while the rank computes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.emulation.sleeping import sleep_until


@dataclass(frozen=True)
class ReductionCosts:
    """What the emulated reduction costs; the buckets of a rank have equal sizes, and each holds one parameter."""

    data_parallel_size: int
    time_reduce: float
    """Milliseconds to reduce all gradients of a rank."""
    num_buckets: int
    """Number of buckets of each model chunk."""


class ReductionLink:
    """One rank's link to its replicas, which reduces one bucket after the other, each once all replicas have it.

    The replicas agree on that time by a real all-reduce of the times at which each was ready. The link's own time
    passes while the rank computes; `finish` waits for the rest.
    """

    def __init__(self, costs: ReductionCosts, num_chunks: int, replicas: dist.ProcessGroup) -> None:
        self._seconds = costs.time_reduce / costs.num_buckets / num_chunks / 1e3
        self._replicas = replicas
        self._started: list[tuple[dist.Work, torch.Tensor]] = []

    def start(self) -> None:
        """Hand the next bucket to the link, now that its gradients are complete on this rank."""
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
