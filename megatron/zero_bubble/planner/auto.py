"""The automatic scheduler: the best schedule for any placement and memory limit.

ZB-1p, ZB-2p, ZB-V, V-Half and V-Min are its schedules within the memory that these names stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron.zero_bubble.planner.memory_limit import held_memory, one_f_one_b_peaks
from megatron.zero_bubble.planner.planned_chunks import best_in_groups
from megatron.zero_bubble.planner.portfolio import recomputed_where_needed
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import Limits, PlanRequest, with_room_for_shards
from megatron.zero_bubble.planner.v_shaped import best_in_v
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute


def planned(own_limits: Callable[[PlanRequest], Limits], request: PlanRequest) -> Schedule:
    """The best schedule found for the costs and the memory limit, by default within `own_limits`.

    It is never worse than the named schedules of the placement that fit. See `best_in_groups`, and for a V `best_in_v`.
    Where the planner chooses what to recompute, nothing is recomputed without a limit.

    Raises:
        Infeasible: nothing fits; with the smallest limit that works.
    """
    limits = request.limits or with_room_for_shards(request, own_limits(request))
    is_v = request.placement.kind == "v"
    best = best_in_v if is_v else partial(best_in_groups, group_size=request.group_size)
    return replace(recomputed_where_needed(Problem.of(request, limits), best), name=request.schedule)


def limit_of_1f1b(request: PlanRequest) -> Limits:
    """1F1B's peak on its fullest rank, for every rank."""
    peaks = one_f_one_b_peaks(request.placement, request.stage_costs, request.num_microbatches, request.recompute)
    return (max(peaks),) * request.num_ranks


def limits_of_multiple(factor: int, request: PlanRequest) -> Limits:
    """`multiple_of_p` for the costs of the request."""
    return multiple_of_p(request.stage_costs, request.num_ranks, factor, request.recompute)


def multiple_of_p(costs: StageCosts, num_ranks: int, factor: float, recompute: Recompute = Recompute.NONE) -> Limits:
    """Rank -> factor times p M_B, where M_B is the memory of one microbatch on this rank, between F and B.

    The memory that B adds comes on top, because a microbatch can hold more after its B than before it. With full
    recomputation it is factor times 1F1B's peak with the same.
    """
    held, times = (num_ranks, factor) if recompute is Recompute.FULL else (factor * num_ranks, 1)
    rooms = (held_memory(costs, (stage,), held, recompute) for stage in range(costs.num_stages))
    return tuple(times * (room + max(0, added)) for room, added in zip(rooms, costs.memory_b, strict=True))


def limits_in_v(num_held: Callable[[int], float], request: PlanRequest) -> Limits:
    """Rank -> the memory of so many microbatches on both of its chunks, with the memory that their B adds.

    Args:
        num_held: microbatches of a rank, by the number of ranks.
    """
    costs, held = request.stage_costs, num_held(request.num_ranks)
    stages_of = map(request.placement.stages_of, range(request.num_ranks))
    return tuple(
        held_memory(costs, stages, held, request.recompute) + sum(max(0, costs.memory_b[stage]) for stage in stages)
        for stages in stages_of
    )
