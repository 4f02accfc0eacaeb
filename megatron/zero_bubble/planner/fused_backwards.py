"""Joins a B and the W right after it into a BW, where a fused backward shortens the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import PlanRequest
from megatron.zero_bubble.schedule.generators.zb_h1 import split_backward
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.timeline import Timeline

_PLANNED_APART = {OpKind.PB, OpKind.PBW, OpKind.D}
"""Kinds of operations; in a schedule with an operation of one of these kinds, B and W stay separate."""


def with_fused_backwards(schedule: Schedule, request: PlanRequest) -> Schedule:
    """Join a B and the W right after it into a BW, if a fused backward saves time.

    A BW delays the gradient for which the previous stage waits. The function compares three schedules: the first joins
    no B and W, the second joins every B with the W right after it, and the third joins a B and a W only if their BW
    ends before the previous stage starts its B. The B and W of the last microbatch stay apart, because replicas reduce
    gradients during the last W.

    Args:
        schedule: a planned schedule without sends and receives.
        request: the request for which the schedule was planned; the costs in the request contain the time that a BW
            saves.

    Returns:
        The fastest of three schedules, by the time that the planner compares (see `Problem.judged`): without BW, with a
        BW where it delays no other stage, and with every possible BW.
    """
    if not any(request.stage_costs.saved_bw) or schedule.groups or schedule.kinds & _PLANNED_APART:
        return schedule
    problem = Problem.solved_by(
        schedule,
        request.stage_costs,
        overlap_communication=request.overlap_communication,
        takes_makespan=request.is_judged_by_makespan,
    )

    def simulated(joined: Iterable[frozenset[Op]]) -> Timeline:
        return problem.simulated(_joined(schedule, list(joined)))

    apart = simulated([frozenset()] * schedule.num_ranks)
    everywhere = [_followed_by_w(lane, schedule.num_microbatches) for lane in schedule.ops]
    without_delay = [ops & unhurried for ops, unhurried in zip(everywhere, _unhurried(apart), strict=True)]
    timelines = (apart, simulated(without_delay), simulated(everywhere))
    # Fused backwards do not change the slowdown by varying durations.
    return min(timelines, key=lambda timeline: problem.judged(timeline.cost, timeline.makespan)).schedule


def with_separate_backwards(schedule: Schedule) -> Schedule:
    """The schedule without sends and receives, with a B and a W in place of each BW."""
    return split_backward(schedule.without_communication(), delay=0)


def with_some_backwards_fused(schedule: Schedule) -> Schedule:
    """The schedule without sends and receives, with some B and W fused, so that one step measures B, W and BW.

    Every BW becomes a B and a W; then, in every stage, every second B that is followed by its W becomes a BW.
    """
    apart = with_separate_backwards(schedule)
    joined = []
    for lane in apart.ops:
        followed = _followed_by_w(lane, schedule.num_microbatches)
        of_chunks = ([op for op in lane if op in followed and op.chunk == c] for c in range(schedule.num_chunks))
        joined.append(frozenset(op for ops in of_chunks for op in ops[::2]))
    return _joined(apart, joined)


def _followed_by_w(lane: Sequence[Op], num_microbatches: int) -> frozenset[Op]:
    """All B that are directly followed by the W of the same stage and microbatch, except B of the last microbatch."""
    return frozenset(
        op
        for op, after in pairwise(lane)
        if op.kind is OpKind.B and after == op._replace(kind=OpKind.W) and op.microbatch < num_microbatches - 1
    )


def _unhurried(timeline: Timeline) -> list[set[Op]]:
    """Rank -> all B for which a BW delays no other stage: the BW ends before the previous stage starts its B."""
    placement, costs = timeline.schedule.placement, timeline.costs
    messages = costs.messages(placement)
    backwards = {
        (placement.stage_of(rank, timed.op.chunk), timed.op.microbatch): timed
        for rank, lane in enumerate(timeline.lanes)
        for timed in lane
        if timed.op.kind in (OpKind.B, OpKind.BW)
    }
    unhurried: list[set[Op]] = [set() for _ in timeline.lanes]
    for (stage, microbatch), (op, _, end) in backwards.items():
        end += costs.time_w[stage] - costs.saved_bw[stage]
        if stage == 0 or end + messages[stage - 1] <= backwards[stage - 1, microbatch].start:
            unhurried[placement.rank_of(stage)].add(op)
    return unhurried


def _joined(schedule: Schedule, joined: Sequence[frozenset[Op]]) -> Schedule:
    """The schedule in which each B in `joined` and the W of the same microbatch and stage become one BW."""

    def kinds(rank: int, op: Op) -> tuple[OpKind, ...]:
        is_in_bw = op.kind is OpKind.W and op._replace(kind=OpKind.B) in joined[rank]
        return () if is_in_bw else (OpKind.BW if op in joined[rank] else op.kind,)

    return schedule.with_kinds(kinds)
