"""Reorders the last W's of every rank by parameter, so that reducing gradients over replicas overlaps with computing.

The gradient of a parameter can be reduced over the data-parallel replicas once its last W is done. In microbatch order
that is the very last W for all parameters alike. The W's after a rank's last B depend on nothing any more, so they can
be done parameter by parameter: all microbatches of one, which is reduced while the next one's are computed ("Zero
Bubble Pipeline Parallelism", appendix A). The terms of each gradient are added in the same order as before, so that no
bit changes. A rank with a vocabulary shard runs its last T's before these W's and its last EW's, which wait for the
first rank, after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, KINDS, OpKind
from megatron.zero_bubble.schedule.pairs import computations
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline

_GRADIENTS = frozenset(kind for kind, facts in KINDS.items() if facts.adds_gradient and OpKind.B not in facts.makes)
"""The operations that compute gradients of weights alone."""
_LAST_COLLECTIVES = frozenset(kind for kind, collective in COLLECTIVES.items() if collective.maker is OpKind.B)
"""The collectives to which only a backward contributes; they also occur among the last gradients."""


def reorder_tail(schedule: Schedule) -> Schedule:
    """The same schedule, lowered or not, with a rank's last W's chunk by chunk, the last chunk first.

    Neither times nor peak memory grow: a W or T in the tail waits for nobody, and no operation there allocates.
    Communication stays where it is.
    """
    return replace(schedule, ops=tuple(_reorder(ops) for ops in schedule.ops))


def _reorder(ops: Sequence[Op]) -> tuple[Op, ...]:
    start, end = _tail(ops)
    gradients = iter(sorted((op for op in ops[start:end] if op.kind in _GRADIENTS), key=_turn))
    reordered = (next(gradients) if op.kind in _GRADIENTS else op for op in ops[start:end])
    return (*ops[:start], *reordered, *ops[end:])


def _turn(op: Op) -> tuple[int, int, int]:
    """The key that orders the last gradients: T, W from the last chunk to the first, EW."""
    return (OpKind.T, OpKind.W, OpKind.EW).index(op.kind), -op.chunk, op.microbatch


def _tail(ops: Sequence[Op]) -> tuple[int, int]:
    """Where the last gradients of a rank begin and end. The optimizer's STEP may follow them."""
    end = len(ops) - sum(op.kind is OpKind.STEP for op in ops[-1:])
    start = end
    while start > 0 and ops[start - 1].kind in _GRADIENTS | _LAST_COLLECTIVES:
        start -= 1
    return start, end


def run_together(ops: Sequence[Op]) -> list[tuple[Op, ...]]:
    """The operations of a rank; those that run as one are together: pairs, and W's of one chunk at the end."""
    start, end = _tail(ops)

    def key(numbered: tuple[int, Op]) -> tuple[bool, int]:
        position, op = numbered
        return (True, op.chunk) if op.kind is OpKind.W else (False, position)

    groups = (tuple(op for _, op in group) for _, group in groupby(enumerate(ops[start:end]), key=key))
    return [*computations(ops[:start]), *groups, *((op,) for op in ops[end:])]


@dataclass(frozen=True)
class Reduction:
    """When the gradients of every rank are reduced, in the unit and from the start of the timeline's times."""

    ends: tuple[float, ...]
    makespan: float
    """Time until the last gradient anywhere is reduced."""
    exposed: float
    """Time by which the reduction makes the makespan longer."""


def simulate_reduction(
    timeline: Timeline, time_reduce: Sequence[float], num_buckets: int, *, by_parameter: bool
) -> Reduction:
    """Reduce the gradients while `timeline` runs, bucket by bucket, on a link of each rank's own.

    A chunk's parameters fill `num_buckets` buckets of equal size, whose gradients are ready in equal steps of the
    chunk's last gradients: those of the last microbatch, or of the whole tail if it runs parameter by parameter. A link
    carries one bucket after the other, in the order in which they are ready, and takes no time from compute. The
    gradient of a vocabulary shard is not reduced with them.

    Args:
        time_reduce: for each stage, the time to reduce all its gradients.
        by_parameter: whether neighbours in the tail run together, see `run_together`.

    Raises:
        ScheduleError: the times are not one a stage, or there is no bucket.
    """
    schedule = timeline.schedule
    if len(time_reduce) != schedule.num_stages or num_buckets < 1:
        raise ScheduleError(
            f"a reduction needs {schedule.num_stages} times and at least one bucket, "
            f"got {len(time_reduce)} and {num_buckets}"
        )
    ends = []
    for rank, lane in enumerate(timeline.lanes):
        ready = []
        for first, last in _last_gradients(lane, schedule.num_chunks, by_parameter):
            each = time_reduce[schedule.placement.stage_of(rank, last.op.chunk)] / num_buckets
            step = (last.end - first.start) / num_buckets
            ready += [(first.start + (k + 1) * step, each) for k in range(num_buckets)]
        end: float = 0
        for time, each in sorted(ready):
            end = max(end, time) + each
        ends.append(max(end, lane[-1].end))
    begin = min(lane[0].start for lane in timeline.lanes)
    makespan = max(ends) - begin
    return Reduction(tuple(ends), makespan, makespan - timeline.makespan)


def _last_gradients(lane: Sequence[TimedOp], num_chunks: int, by_parameter: bool) -> list[tuple[TimedOp, TimedOp]]:
    """For each chunk, the first and the last of the operations that together complete its gradients."""
    timed = {timed.op: timed for timed in lane}
    last: dict[int, tuple[TimedOp, TimedOp]] = {}
    ops = [timed.op for timed in lane]
    for group in run_together(ops) if by_parameter else [(op,) for op in ops]:
        if OpKind.W in KINDS[group[0].kind].makes:
            last[group[0].chunk] = timed[group[0]], timed[group[-1]]
    return [last[chunk] for chunk in range(num_chunks)]
