"""Measures how long the replicas of a pipeline wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.recorder import Clock

_MOST_ITERATIONS = 1000
"""Largest number of iterations whose marks are kept until the next call of `ReplicaWaits.take`."""


@dataclass(frozen=True)
class Waits:
    """Mean seconds per iteration for which each replica waited for other replicas."""

    seconds: tuple[float, ...]

    @property
    def slowest(self) -> int:
        """Index of the slowest replica: the replica that waited for the shortest time."""
        return self.seconds.index(min(self.seconds))


class ReplicaWaits:
    """Measures how long this rank waits in reductions over the replicas of the pipeline.

    The last rank to begin a reduction does not wait. The time that the last rank spends in the reduction is therefore
    the communication time of all ranks. The waiting time of a rank is the rank's time in the reduction minus the
    communication time.

    Args:
        group: this rank and the ranks at the same position in the other replicas of the pipeline.
        clock: the clock of the rank's device.
    """

    def __init__(self, group: dist.ProcessGroup, clock: Clock) -> None:
        self._group, self._clock = group, clock
        self._marks: list[Any] = []
        self._iterations: deque[tuple[list[Any], int]] = deque(maxlen=_MOST_ITERATIONS)
        """For each iteration, the marks at the start and the end of each reduction, and the `group_size`."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time of the `with` block as time in a reduction with other replicas."""
        self._marks.append(self._clock.mark())
        yield
        self._marks.append(self._clock.mark())

    def end_iteration(self, group_size: int) -> None:
        """End an iteration; each replica waited for the others in its group of `group_size` consecutive replicas."""
        self._iterations.append((self._marks, group_size))
        self._marks = []

    def take(self) -> Waits | None:
        """Return the mean waiting times since the last call of `take`; None if no iteration has ended since then.

        The mean is over at most the last 1000 iterations. All replicas call `take` together.
        """
        iterations = list(self._iterations)
        self._iterations.clear()
        if not iterations:
            return None
        spent = []
        for marks, _ in iterations:
            times = self._clock.seconds(marks)
            spent.append(sum(end - start for start, end in zip(times[::2], times[1::2], strict=True)))
        return mean_waits(from_all_ranks(spent, self._group), [size for _, size in iterations])


def mean_waits(spent: Sequence[Sequence[float]], group_sizes: Sequence[int]) -> Waits:
    """Compute the mean waiting time of each replica per iteration.

    Args:
        spent: for each replica, the seconds that the replica spent in reductions in each iteration.
        group_sizes: for each iteration, the number of consecutive replicas that waited for each other as a group.
    """
    totals = [0.0] * len(spent)
    for iteration, size in enumerate(group_sizes):
        for start in range(0, len(spent), size):
            group = range(start, start + size)
            least = min(spent[replica][iteration] for replica in group)
            for replica in group:
                totals[replica] += spent[replica][iteration] - least
    return Waits(tuple(total / len(group_sizes) for total in totals))
