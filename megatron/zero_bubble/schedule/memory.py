"""The activation memory of a schedule, computed from the order of operations and their memory costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind

_ALLOCATES_LATER = {kind: facts.undoes_memory_of for kind, facts in KINDS.items() if facts.undoes_memory_of}
"""Kind of operation -> kind of an earlier operation that allocates less if a microbatch has both operations: R -> F."""


def memory_held(
    schedule: Schedule, costs: StageCosts, rank: int, lengths: Sequence[float] = ()
) -> Iterator[tuple[Op, float, float]]:
    """Yield (operation, memory during the operation, memory after the operation) for each compute operation of `rank`.

    An operation allocates memory at its start, and releases memory at its end.

    Args:
        schedule: schedule with or without communication.
        costs: costs of the stages; the yielded memory has the unit of the costs.
        rank: rank whose memory is computed.
        lengths: microbatch -> factor by which the costs are multiplied, as in `simulate`.
    """
    memory: float = 0
    schedule = schedule.without_communication()
    by_kind = in_groups(costs, schedule.groups).memory
    for op, change in zip(schedule.ops[rank], _changes(schedule, rank, by_kind, lengths), strict=True):
        yield op, memory + change if change > 0 else memory, memory + change
        memory += change


def _changes(
    schedule: Schedule, rank: int, by_kind: Mapping[OpKind, Sequence[float]], lengths: Sequence[float]
) -> Iterable[float]:
    """The change of memory by each operation of `rank`; `by_kind` maps kinds of operations to changes on each stage."""
    ops, stages = schedule.ops[rank], schedule.placement.stages_of(rank)
    changes = {(kind, chunk): by_kind[kind][stage] for kind in by_kind for chunk, stage in enumerate(stages)}
    usual: Iterable[float] = map(changes.__getitem__, map(itemgetter(0, 2), ops))
    if lengths:
        usual = (change * lengths[op.microbatch] for change, op in zip(usual, ops, strict=True))
    allocates_later = [(kind, later) for later, kind in _ALLOCATES_LATER.items() if later in schedule.kinds]
    if not allocates_later:
        return usual
    different = {
        (kind, microbatch, chunk): (changes[kind, chunk] - changes[later, chunk])
        * (lengths[microbatch] if lengths else 1)
        for kind, later in allocates_later
        for other, microbatch, chunk in ops
        if other is later
    }
    return map(different.get, ops, usual)


class PeakMemory(NamedTuple):
    """The peak memory of a rank, and the first operation that reaches this peak."""

    amount: float
    """Peak memory, in the unit of the costs."""
    op: Op | None
    """The first operation that reaches the peak; None on a rank without operations."""


def peaks(schedule: Schedule, costs: StageCosts, lengths: Sequence[float] = ()) -> tuple[PeakMemory, ...]:
    """Rank -> peak memory of the rank, and the first operation that reaches the peak memory."""
    of_ranks = []
    for rank in range(schedule.num_ranks):
        memory = [(op, during) for op, during, _ in memory_held(schedule, costs, rank, lengths)]
        amount = max((during for _, during in memory), default=0)
        # Equal sums may differ by rounding errors, so the first operation is searched with a tolerance.
        of_ranks.append(PeakMemory(amount, next((op for op, during in memory if during >= amount * (1 - 1e-9)), None)))
    return tuple(of_ranks)


def peak_memory(schedule: Schedule, costs: StageCosts, lengths: Sequence[float] = ()) -> tuple[float, ...]:
    """Rank -> peak memory of the activations of the rank, in the unit of the costs."""
    schedule = schedule.without_communication()
    by_kind = in_groups(costs, schedule.groups).memory
    changes = (_changes(schedule, rank, by_kind, lengths) for rank in range(schedule.num_ranks))
    # The memory after each operation is enough, because an operation that releases memory does not raise the peak.
    return tuple(max(accumulate(each, initial=0)) for each in changes)
