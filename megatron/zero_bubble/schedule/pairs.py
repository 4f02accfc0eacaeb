"""Pairs: a rank runs an F and the backward right after the F (`&B` or `&BW`) as one operation.

A pair alternates between layers of the forward and layers of the backward. Either the forward or the backward of the
pair computes while the other exchanges tokens between experts (megatron-core's combined 1F1B). The forward and the
backward of a pair belong to different microbatches or stages. A pair starts when the inputs of both operations are
ready, and the results of both operations are ready when the pair ends. In a timeline, the backward of a pair lasts as
long as the whole pair, and the forward takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import KINDS, PAIRED, OpKind


def pairs(ops: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """The (forward, backward) of each pair of a rank, in order."""
    return ((before, op) for before, op in pairwise(ops) if op.kind in PAIRED)


def computations(ops: Sequence[Op]) -> Iterable[tuple[Op, ...]]:
    """The operations of a rank in order: (forward, backward) for each pair, (operation,) for each other operation."""
    if not any(op.kind in PAIRED for op in ops):
        return zip(ops, strict=True)
    first = {position - 1 for position, op in enumerate(ops) if op.kind in PAIRED}
    return [
        (op, ops[position + 1]) if position in first else (op,)
        for position, op in enumerate(ops)
        if position - 1 not in first
    ]


def numbered(ops: Sequence[Op]) -> Iterator[tuple[int, Op]]:
    """Yield (position, operation) for a rank; both operations of a pair have the same position."""
    return ((place, op) for place, together in enumerate(computations(ops)) for op in together)


def forwards_in_pairs(schedule: Schedule, rank: int) -> frozenset[Op]:
    """The forwards of `rank` that run in pairs."""
    if not schedule.has_pairs:
        return frozenset()
    return frozenset(forward for forward, _ in pairs(schedule.ops[rank]))


def times_in_pairs(schedule: Schedule, costs: StageCosts, rank: int) -> dict[Op, float]:
    """Operation of a pair on `rank` -> its duration: the time of the whole pair for the backward, 0 for the forward."""
    times: dict[Op, float] = {}
    if not schedule.has_pairs:
        return times
    stages, time_of_pair = schedule.placement.stages_of(rank), cache(costs.time_of_pair)
    for forward, backward in pairs(schedule.ops[rank]):
        times[forward] = 0
        times[backward] = time_of_pair(stages[forward.chunk], backward.kind, stages[backward.chunk])
    return times


def check_pairs(schedule: Schedule, rank: int) -> None:
    """Raise `InvalidSchedule` if the backward of a pair is not right after a forward."""
    if not schedule.has_pairs:
        return
    before: Op | None = None
    for op in schedule.ops[rank]:
        if op.kind in PAIRED and (before is None or before.kind is not KINDS[op.kind].pairs_with):
            raise schedule.invalid(f"rank {rank} runs {op} without {KINDS[op.kind].pairs_with} right before it")
        before = op


def in_pairs(schedule: Schedule, chosen: Sequence[frozenset[Op]]) -> Schedule:
    """Join each chosen backward and the forward right before it into a pair.

    Args:
        schedule: schedule without communication.
        chosen: rank -> chosen B and BW of the rank, each of which has a forward right before it.
    """
    assert not schedule.is_lowered
    paired = {OpKind.B: OpKind.PB, OpKind.BW: OpKind.PBW}
    return schedule.with_kinds(lambda rank, op: (paired[op.kind] if op in chosen[rank] else op.kind,))


def apart(schedule: Schedule) -> Schedule:
    """The given schedule without communication and without pairs: every forward and backward is a separate
    operation."""
    return schedule.without_communication().with_kinds(lambda _, op: (_SPLIT.get(op.kind, op.kind),))


def half_apart(schedule: Schedule) -> Schedule:
    """Split every second pair of a schedule into its two operations, and remove communication.

    For each combination of the forward's chunk and the backward's chunk, every second pair is split. A training step
    with the returned schedule measures pairs, and also single forwards and backwards of every chunk.
    """
    schedule = schedule.without_communication()
    separated: list[set[Op]] = [set() for _ in schedule.ops]
    for lane, here in zip(schedule.ops, separated, strict=True):
        together = list(pairs(lane))
        in_pairs = {op for pair in together for op in pair}
        alone = {(KINDS[op.kind].makes[0], op.chunk) for op in lane if op not in in_pairs}
        kept: set[tuple[int, int]] = set()
        for forward, backward in together:
            chunks, parts = (forward.chunk, backward.chunk), {(OpKind.F, forward.chunk), (OpKind.B, backward.chunk)}
            if chunks not in kept and parts <= alone:
                kept.add(chunks)
            else:
                kept.discard(chunks)
                here.add(backward)
                alone |= parts
    return schedule.with_kinds(lambda rank, op: (_SPLIT[op.kind] if op in separated[rank] else op.kind,))


_SPLIT = {OpKind.PB: OpKind.B, OpKind.PBW: OpKind.BW}
"""Kind of a backward in a pair -> kind of the same backward as a separate operation."""
