"""The memory that the operations of a schedule hold: it follows from their order alone."""

from __future__ import annotations

from collections.abc import Iterator

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


def peak_memory(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """For every rank, the most that its operations hold at once."""
    return tuple(
        max((during for _, during, _ in memory_held(schedule, costs, rank)), default=0)
        for rank in range(schedule.num_ranks)
    )
