"""The automatic scheduler: plans a fast schedule for any placement and memory limit.

The automatic scheduler also plans ZB-1p, ZB-2p, ZB-V, V-Half and V-Min, whose names imply memory limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron.zero_bubble.planner.memory_limit import memory_in_flight, memory_left, one_f_one_b_peaks
from megatron.zero_bubble.planner.planned_chunks import best_in_groups
from megatron.zero_bubble.planner.portfolio import cost_of, is_draft
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import Limits, PlanRequest, tolerance, with_room_for_shards
from megatron.zero_bubble.planner.v_shaped import best_in_v
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute, num_recomputed

PARTS = 2
"""Number of parts into which the budget is divided if the planner chooses the microbatches with an R."""


def planned(own_limits: Callable[[PlanRequest], Limits], request: PlanRequest) -> Schedule:
    """Plan a fast schedule for the costs of a request, within the memory limits of the ranks.

    On linear and interleaved placements, the plan is at least as fast as every schedule with a published order, such as
    1F1B or ZB-H1, that has the same placement and fits in memory. The exception is a plan with vocabulary shards and
    zero effort. If no schedule with the request's group size fits in memory, the sizes of the groups are planned.

    Args:
        own_limits: function that computes the memory limits of the ranks for a request without memory limits.
        request: a checked request (see `PlanRequest.checked`) for one layout.

    Raises:
        Infeasible: no schedule fits in memory. The attribute `smallest_limit` of the `Infeasible` error is the smallest
            memory limit in which a schedule fits.
    """
    limits = request.limits or with_room_for_shards(request, own_limits(request))
    best = best_in_v if request.placement.kind == "v" else best_in_groups
    problem = Problem.of(request, limits)
    try:
        schedule = _recomputed_where_needed(problem, best)
    except Infeasible:
        if problem.group_size is None:
            raise
        schedule = _recomputed_where_needed(replace(problem, group_size=None), best)
    return replace(schedule, name=request.schedule)


def _recomputed_where_needed(problem: Problem, best: Callable[[Problem], Schedule]) -> Schedule:
    """Plan a problem with the function `best`; with `Recompute.PLANNED`, also choose the microbatches with an R.

    With `Recompute.PLANNED` there are three candidate schedules: with no R, with an R for each microbatch, and with
    some R. The fastest candidate is taken; among equally fast candidates, the candidate with the fewest R is taken. The
    candidate without R is taken at once if unlimited memory would not make this candidate faster. With a small budget
    (see `is_draft`), the candidate with an R for each microbatch is left out.
    """
    if problem.recompute is not Recompute.PLANNED:
        return best(problem)
    is_quick, full = is_draft(problem), replace(problem, recompute=Recompute.FULL)
    problem = replace(problem, budget=problem.budget // PARTS)
    keeping = problem.keeping_everything()
    candidates, costs, refused = [], [], []

    def offer(variant: Problem) -> None:
        try:
            candidates.append(best(variant))
        except Infeasible as error:
            refused.append(error)
        else:
            costs.append(cost_of(candidates[-1], problem))

    if keeping.is_feasible:
        offer(keeping)
        if costs and not is_quick and not _lacks_memory(keeping, costs[0] * (1 - 1e-9), best):
            return candidates[0]
    problem.check_feasible()
    for variant in (problem, full)[: 1 if is_quick else 2]:
        if not costs or variant.bound_if_fused < min(costs):
            offer(variant)
    if not candidates:
        raise refused[0]
    longest = min(costs) + tolerance(min(costs))
    equals = [schedule for schedule, cost in zip(candidates, costs, strict=True) if cost <= longest]
    return min(equals, key=num_recomputed)


def _lacks_memory(keeping: Problem, cost: float, best: Callable[[Problem], Schedule]) -> bool:
    """Whether unlimited memory allows a plan without R that takes less time than `cost`."""
    enough = tuple(map(max, keeping.limits, (keeping.num_microbatches * whole for whole in keeping.whole_memory)))
    unlimited = replace(keeping, limits=enough, budget=0 if keeping.is_long else keeping.budget)
    return keeping.limits != enough and cost > unlimited.aim and cost > cost_of(best(unlimited), unlimited)


def limit_of_1f1b(request: PlanRequest) -> Limits:
    """Memory limits of the ranks, all equal to the largest peak memory of a rank under 1F1B."""
    peaks = one_f_one_b_peaks(request.placement, request.stage_costs, request.num_microbatches, request.recompute)
    return (max(peaks),) * request.num_ranks


def limits_of_multiple(factor: int, request: PlanRequest) -> Limits:
    """Memory limits for a schedule, such as ZB-2p, that may use a multiple of the memory of p microbatches on p ranks.

    Under full recomputation, only one of the p microbatches has all its activations.

    Args:
        factor: number by which the memory of p microbatches is multiplied, such as 1 for ZB-1p and 2 for ZB-2p.
        request: a request whose costs and ranks determine the memory limits.
    """
    if request.recompute is Recompute.FULL:
        return limits_in_flight(lambda p: p, request, factor)
    return limits_in_flight(lambda p: factor * p, request)


def limits_in_flight(in_flight_on: Callable[[int], float], request: PlanRequest, factor: int = 1) -> Limits:
    """Rank -> `factor` times the memory of microbatches in flight, plus the memory that microbatches leave allocated.

    The memory of microbatches in flight includes the memory that one B of each chunk adds, because a microbatch may
    take more memory after its B than before its B. Microbatches leave memory allocated from their W until the end of
    the step.

    Args:
        in_flight_on: function from the number of pipeline ranks to the number of microbatches in flight on each chunk.
        request: a request whose costs and ranks determine the memory limits.
        factor: number by which the memory of microbatches in flight is multiplied.
    """
    costs, in_flight = request.stage_costs, in_flight_on(request.num_ranks)
    limits = []
    for rank in range(request.num_ranks):
        stages = request.placement.stages_of(rank)
        memory = memory_in_flight(costs, stages, in_flight, request.recompute)
        memory += sum(max(0, costs.memory_b[stage]) for stage in stages)
        limits.append(factor * memory + request.num_microbatches * memory_left(costs, stages))
    return tuple(limits)
