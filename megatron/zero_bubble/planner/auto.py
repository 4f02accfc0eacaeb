"""The automatic scheduler: plans a fast schedule for any placement and memory limit.

The automatic scheduler also plans ZB-1p, ZB-2p, ZB-V, V-Half and V-Min, whose names imply memory limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import add

from megatron.zero_bubble.planner.memory_limit import memory_in_flight, memory_left, one_f_one_b_peaks
from megatron.zero_bubble.planner.planned_chunks import best_in_groups
from megatron.zero_bubble.planner.portfolio import recomputed_where_needed
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import Limits, PlanRequest, with_room_for_shards
from megatron.zero_bubble.planner.v_shaped import best_in_v
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute


def planned(own_limits: Callable[[PlanRequest], Limits], request: PlanRequest) -> Schedule:
    """Plan a fast schedule for the costs of a request, within the memory limits of the ranks.

    On linear and interleaved placements, the plan is at least as fast as every schedule with a published order, such as
    1F1B or ZB-H1, that has the same placement and fits in memory. The exception is a plan with vocabulary shards and
    zero effort.

    Args:
        own_limits: function that computes the memory limits of the ranks for a request without memory limits.
        request: a checked request (see `PlanRequest.checked`) for one layout.

    Raises:
        Infeasible: no schedule fits in memory. The attribute `smallest_limit` of the `Infeasible` error is the smallest
            memory limit in which a schedule fits.
    """
    limits = request.limits or with_room_for_shards(request, own_limits(request))
    is_v = request.placement.kind == "v"
    best = best_in_v if is_v else partial(best_in_groups, group_size=request.group_size)
    return replace(recomputed_where_needed(Problem.of(request, limits), best), name=request.schedule)


def limit_of_1f1b(request: PlanRequest) -> Limits:
    """Memory limits of the ranks, all equal to the largest peak memory of a rank under 1F1B."""
    peaks = one_f_one_b_peaks(request.placement, request.stage_costs, request.num_microbatches, request.recompute)
    return (max(peaks),) * request.num_ranks


def limits_of_multiple(factor: int, request: PlanRequest) -> Limits:
    """Memory limits of p ranks for a schedule, such as ZB-2p, that may use a multiple of the memory of p microbatches.

    Each limit is the sum of two amounts: the limit that `multiple_of_p` returns for the rank, and the memory that
    microbatches keep allocated from their W until the end of the step.
    """
    limits = multiple_of_p(request.stage_costs, request.num_ranks, factor, request.recompute)
    return tuple(map(add, limits, _left(request)))


def multiple_of_p(costs: StageCosts, num_ranks: int, factor: float, recompute: Recompute = Recompute.NONE) -> Limits:
    """Memory limits of p ranks with one stage each: the product of `factor` and the memory of p microbatches.

    The memory that one B adds is part of each limit, because a microbatch may take more memory after its B than before
    its B. Under full recomputation, only one of the p microbatches has all its activations.

    Args:
        costs: costs of the stages, with one stage per rank.
        num_ranks: number of ranks, p.
        factor: number by which the memory of p microbatches is multiplied, such as 1 for ZB-1p and 2 for ZB-2p.
        recompute: which microbatches have an R (recomputation).

    Returns:
        One memory limit per rank, in the unit of memory of the costs.
    """
    in_flight, times = (num_ranks, factor) if recompute is Recompute.FULL else (factor * num_ranks, 1)
    memory = (memory_in_flight(costs, (stage,), in_flight, recompute) for stage in range(costs.num_stages))
    return tuple(times * (amount + max(0, added)) for amount, added in zip(memory, costs.memory_b, strict=True))


def limits_in_v(in_flight_on: Callable[[int], float], request: PlanRequest) -> Limits:
    """Memory limits of p ranks in a V-shaped placement, for `in_flight_on(p)` microbatches in flight on each chunk.

    Each limit includes the memory that one B of each chunk adds.

    Args:
        in_flight_on: function from the number of pipeline ranks to the number of microbatches in flight on each chunk.
        request: a request whose costs and ranks determine the memory limits.
    """
    costs, in_flight = request.stage_costs, in_flight_on(request.num_ranks)
    stages_of = map(request.placement.stages_of, range(request.num_ranks))
    return tuple(
        memory_in_flight(costs, stages, in_flight, request.recompute)
        + sum(max(0, costs.memory_b[stage]) for stage in stages)
        + left
        for stages, left in zip(stages_of, _left(request), strict=True)
    )


def _left(request: PlanRequest) -> Iterator[float]:
    """Yield for each rank the memory that microbatches keep allocated from their W until the end of the step."""
    for rank in range(request.num_ranks):
        stages = request.placement.stages_of(rank)
        yield request.num_microbatches * memory_left(request.stage_costs, stages)
