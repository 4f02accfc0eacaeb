"""The memory that the operations of a schedule hold: it follows from their order alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Op, Schedule


def memory_held(schedule: Schedule, costs: StageCosts, rank: int) -> Iterator[tuple[Op, float, float]]:
    """For every compute operation of `rank`: the operation, what the rank holds while it runs, and after it.

    What an operation adds it adds at its start; what it releases it releases at its end. The unit is
    that of the costs' memory.
    """
    changes = costs.memory()
    held: float = 0
    for op in schedule.compute_ops(rank):
        change = changes[op.kind][schedule.placement.stage_of(rank, op.chunk)]
        yield op, held + max(0, change), held + change
        held += change


class PeakMemory(NamedTuple):
    """The most that a rank holds at once, and the first operation that needs it."""

    amount: float
    op: Op | None
    """None on a rank without operations."""


def peaks(schedule: Schedule, costs: StageCosts) -> tuple[PeakMemory, ...]:
    """For every rank, the most that its operations hold at once, and the first operation that reaches it."""
    return tuple(_peak(schedule, costs, rank) for rank in range(schedule.num_ranks))


def _peak(schedule: Schedule, costs: StageCosts, rank: int) -> PeakMemory:
    held = [(op, during) for op, during, _ in memory_held(schedule, costs, rank)]
    amount = max((during for _, during in held), default=0)
    # Sums that should be equal differ in the last digits, so the first operation is found with a tolerance.
    return PeakMemory(amount, next((op for op, during in held if during >= amount * (1 - 1e-9)), None))


def peak_memory(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """For every rank, the most that its operations hold at once."""
    return tuple(peak.amount for peak in peaks(schedule, costs))
