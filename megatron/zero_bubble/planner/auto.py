"""The automatic scheduler for any placement and memory limit; ZB-1p and ZB-2p are two limits of one chunk a rank."""

from __future__ import annotations

from functools import partial

from megatron.zero_bubble.planner.memory_limit import one_f_one_b_peaks
from megatron.zero_bubble.planner.planned_chunks import best_in_groups
from megatron.zero_bubble.planner.portfolio import recomputed_where_needed
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import PlanRequest, with_room_for_shards
from megatron.zero_bubble.planner.v_shaped import best_in_v
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute


def auto(request: PlanRequest) -> Schedule:
    """The best schedule found for the costs and the memory limit, by default that of 1F1B.

    It is never worse than the named schedules of the placement that fit. See `best_in_groups`, and for a V `best_in_v`.
    Where only what has no room is recomputed, nothing is without a limit. Raises `Infeasible` with the smallest limit
    that works.
    """
    placement, limits = request.placement, request.limits
    if limits is None:
        peaks = one_f_one_b_peaks(placement, request.stage_costs, request.num_microbatches, request.recompute)
        limits = with_room_for_shards(request, (max(peaks),) * request.num_ranks)
    problem = Problem.of(request, limits)
    if placement.kind == "v":
        return recomputed_where_needed(problem, partial(best_in_v, "auto"))
    return recomputed_where_needed(problem, partial(best_in_groups, "auto", request.group_size))


def in_multiple_of_1f1b(name: str, factor: int, request: PlanRequest) -> Schedule:
    """The automatic scheduler in `factor` times the memory of 1F1B, p M_B on every rank, in its own M_B.

    In twice that memory the bubble can be close to zero.
    """
    limits = multiple_of_p(request.stage_costs, request.num_ranks, factor, request.recompute)
    limits = with_room_for_shards(request, limits)
    return recomputed_where_needed(Problem.of(request, limits), partial(best_in_groups, name, None))


def multiple_of_p(
    costs: StageCosts, num_ranks: int, factor: float, recompute: Recompute = Recompute.NONE
) -> tuple[float, ...]:
    """Rank -> factor times p M_B, where M_B is the memory of one microbatch on this rank, between F and B.

    The memory that B adds comes on top, because a microbatch can hold more after its B than before it. With full
    recomputation it is factor times 1F1B's peak with the same: p microbatches without the activations that R restores,
    and the memory of one R and one B.
    """
    if recompute is Recompute.FULL:
        each = zip(costs.memory_f, costs.memory_r, costs.memory_b, strict=True)
        return tuple(factor * (num_ranks * (f - r) + r + max(0, b)) for f, r, b in each)
    return tuple(
        factor * num_ranks * kept + max(0, added) for kept, added in zip(costs.memory_f, costs.memory_b, strict=True)
    )
