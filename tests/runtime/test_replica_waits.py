"""A replica's wait is what it spends in a reduction beyond the replica of its group that came last."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megatron.zero_bubble.runtime.recorder import HostClock
from megatron.zero_bubble.runtime.replica_waits import ReplicaWaits, mean_waits


def test_the_last_of_a_group_waits_for_nobody():
    spent = [[5.0, 1.0], [1.0, 5.0], [9.0, 1.0], [2.0, 8.0]]
    assert mean_waits(spent, [4, 4]).seconds == (2.0, 2.0, 4.0, 4.0)
    waits = mean_waits(spent, [2, 4])
    assert waits.seconds == (2.0, 2.0, 3.5, 3.5)
    assert mean_waits(spent, [1, 1]).seconds == (0.0, 0.0, 0.0, 0.0)


def test_the_slowest_replica_is_the_one_that_waited_least():
    assert mean_waits([[3.0], [0.5], [3.1]], [3]).slowest == 1


class CountingClock(HostClock):
    """Each mark is a second after the one before."""

    def __init__(self) -> None:
        self._now = 0.0

    def mark(self) -> float:
        self._now += 1.0
        return self._now


def test_an_iteration_that_has_not_ended_counts_next_time(one_rank: dist.ProcessGroup) -> None:
    waits = ReplicaWaits(one_rank, CountingClock())
    assert waits.take() is None
    for _ in range(2):
        with waits.measured():
            pass
    waits.end_iteration(1)
    with waits.measured():
        pass
    taken = waits.take()
    assert taken is not None
    assert taken.seconds == (0.0,)
    assert waits.take() is None
    waits.end_iteration(1)
    assert waits.take() is not None


def test_a_loop_that_never_asks_keeps_the_marks_of_a_thousand_iterations(one_rank: dist.ProcessGroup) -> None:
    """A mark on a GPU is a CUDA event."""

    class ReadClock(CountingClock):
        reads = 0

        def seconds(self, marks: Sequence[float]) -> list[float]:
            self.reads += 1
            return super().seconds(marks)

    clock = ReadClock()
    waits = ReplicaWaits(one_rank, clock)
    for _ in range(1200):
        with waits.measured():
            pass
        waits.end_iteration(1)
    assert waits.take() is not None
    assert clock.reads == 1000
