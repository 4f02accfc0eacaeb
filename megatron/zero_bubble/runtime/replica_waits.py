"""Measures how long the replicas of a pipeline wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.recorder import Clock


@dataclass(frozen=True)
class Waits:
    """Mean seconds per iteration for which each replica waited for other replicas."""

    seconds: tuple[float, ...]

    @property
    def slowest(self) -> int:
        """Index of the slowest replica, which is the replica that waited least."""
        return self.seconds.index(min(self.seconds))


class ReplicaWaits:
    """Measures the time that this rank spends in reductions with its replicas.

    The rank that begins a reduction last does not wait, so this rank's time in the reduction is the communication time
    of all ranks. The waiting time of a rank is the rank's time in the reduction minus the communication time.

    Args:
        group: this rank and the ranks at the same place in the other replicas of the pipeline.
        clock: the clock of the rank's device.
    """

    def __init__(self, group: dist.ProcessGroup, clock: Clock, device: torch.device) -> None:
        self._group, self._clock, self._device = group, clock, device
        self._marks: list[Any] = []
        self._num_marks: list[int] = []
        self._group_sizes: list[int] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time of the `with` block as time in a reduction with other replicas."""
        self._marks.append(self._clock.mark())
        yield
        self._marks.append(self._clock.mark())

    def end_iteration(self, group_size: int) -> None:
        """End an iteration in which groups of `group_size` consecutive replicas waited for each other."""
        self._num_marks.append(len(self._marks) - sum(self._num_marks))
        self._group_sizes.append(group_size)

    def take(self) -> Waits | None:
        """Return the waits since the last call; None if no iteration has ended. All replicas call `take` together."""
        counts, sizes = self._num_marks, self._group_sizes
        # The marks of an unfinished iteration may be included.
        marks, self._marks = self._marks[: sum(counts)], self._marks[sum(counts) :]
        self._num_marks, self._group_sizes = [], []
        if not sizes:
            return None
        times = iter(self._clock.seconds(marks))
        # Marks come in pairs: one at the beginning and one at the end of a reduction.
        spent = [sum(next(times) * sign for sign in (-1, 1) * (count // 2)) for count in counts]
        own = torch.tensor(spent, dtype=torch.float64, device=self._device)
        gathered = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(gathered, own, group=self._group)
        return mean_waits([each.tolist() for each in gathered], sizes)


def mean_waits(spent: Sequence[Sequence[float]], group_sizes: Sequence[int]) -> Waits:
    """Compute the mean waits of replicas.

    Args:
        spent: for each replica, its seconds in reductions in each iteration.
        group_sizes: for each iteration, the number of consecutive replicas that waited for each other.
    """
    totals = [0.0] * len(spent)
    for iteration, size in enumerate(group_sizes):
        for start in range(0, len(spent), size):
            group = range(start, start + size)
            least = min(spent[replica][iteration] for replica in group)
            for replica in group:
                totals[replica] += spent[replica][iteration] - least
    return Waits(tuple(total / len(group_sizes) for total in totals))
