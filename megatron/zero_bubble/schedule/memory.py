"""The memory that the operations of a schedule hold: it follows from their order alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind

_ALLOCATES_LATER: dict[OpKind, tuple[OpKind, ...]] = {
    facts.undoes_memory_of: tuple(kind for kind in KINDS if KINDS[kind].undoes_memory_of is facts.undoes_memory_of)
    for facts in KINDS.values()
    if facts.undoes_memory_of is not None
}
"""For a kind, the kinds that allocate a part of its memory in its place, where a schedule has them."""


def memory_held(schedule: Schedule, costs: StageCosts, rank: int) -> Iterator[tuple[Op, float, float]]:
    """Yield every compute operation of `rank` with the rank's memory during and after it.

    An operation allocates memory at its start, and releases memory at its end. The unit is that of the costs' memory.
    """
    held: float = 0
    ops = tuple(schedule.compute_ops(rank))
    by_kind = costs.in_groups(schedule.groups).memory()
    for op, change in zip(ops, _changes(schedule, by_kind, rank, ops), strict=True):
        yield op, held + change if change > 0 else held, held + change
        held += change


def _changes(
    schedule: Schedule, by_kind: Mapping[OpKind, Sequence[float]], rank: int, ops: Sequence[Op]
) -> Iterable[float]:
    """The change of memory of these operations of `rank`; `by_kind` has that of every kind and stage."""
    stages = schedule.placement.stages_of(rank)
    changes = {(kind, chunk): by_kind[kind][stage] for kind in by_kind for chunk, stage in enumerate(stages)}
    alone = map(changes.__getitem__, map(itemgetter(0, 2), ops))
    allocates_later = [
        (kind, later) for kind, kinds in _ALLOCATES_LATER.items() for later in kinds if later in schedule.kinds
    ]
    if not allocates_later:
        return alone
    different = {
        (kind, microbatch, chunk): changes[kind, chunk] - changes[later, chunk]
        for kind, later in allocates_later
        for other, microbatch, chunk in ops
        if other is later
    }
    return map(different.get, ops, alone)


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
    by_kind = costs.in_groups(schedule.groups).memory()
    lanes = schedule.without_communication().ops
    # An operation that releases memory needs no more while it runs than the memory in use before it.
    return tuple(max(accumulate(_changes(schedule, by_kind, rank, ops), initial=0)) for rank, ops in enumerate(lanes))
