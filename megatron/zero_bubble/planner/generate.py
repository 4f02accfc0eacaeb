"""Makes the schedule of a `PlanRequest` with one placement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from megatron.zero_bubble.planner.fused_backwards import with_fused_backwards
from megatron.zero_bubble.planner.memory_limit import memory_left
from megatron.zero_bubble.planner.offloading import offloaded
from megatron.zero_bubble.planner.paired import with_pairs
from megatron.zero_bubble.planner.periodic import extended, fewer_microbatches
from megatron.zero_bubble.planner.portfolio import cost_of
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of, placement_for
from megatron.zero_bubble.planner.request import Limits, PlanRequest, check_within
from megatron.zero_bubble.planner.restoring import groupings
from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.collector import paused_collector
from megatron.zero_bubble.schedule.costs import SMALLEST, StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError, enough
from megatron.zero_bubble.schedule.ir import PlacementKind, Schedule
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.shard_ops import with_best_delay

OFFLOAD_PARTS = 4
"""Each search for schedules that copy activations to the host gets at most the effort divided by this number."""


def request_for(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    placement_kind: PlacementKind | None = None,
    recompute: Recompute | str = Recompute.NONE,
    **options: Any,
) -> PlanRequest:
    """Make a request for the schedule `name`.

    Args:
        name: name of the schedule, one of `names()`.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of an iteration.
        num_chunks: model chunks per rank; by default the schedule's own number of chunks.
        placement_kind: kind of placement, for `auto` only; by default linear for one chunk per rank, else interleaved.
        recompute: which microbatches have an R (recomputation), a `Recompute` or its value, such as "full".
        options: other fields of `PlanRequest`, such as `costs`.

    Returns:
        The request, with one placement.

    Raises:
        ScheduleError: no schedule has this name, the schedule is for another placement, or there is no rank or no
            microbatch.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"schedule {name} needs at least one rank and one microbatch, got {num_ranks} and {num_microbatches}"
        )
    placement = placement_for(name, num_ranks, num_chunks, placement_kind)
    return PlanRequest(name, num_microbatches, (placement,), recomputes=(Recompute(recompute),), **options)


def generate(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Make the schedule `name` from the arguments of `request_for`; raise the same errors as `schedule_of`."""
    return schedule_of(request_for(name, num_ranks, num_microbatches, **options))


@paused_collector()
def schedule_of(request: PlanRequest) -> Schedule:
    """Make a schedule, still without sends and receives, for a request with one placement.

    If the request allows offload, activations are copied to the host and back where copies make the schedule faster. A
    stage that is short of memory may recompute its activations in several groups of layers. The function returns the
    fastest schedule; among equally fast schedules, the function prefers the schedule with the fewest groups of layers.
    With an effort of zero, the function returns the first schedule that fits in memory. Together, the searches with
    several groups of layers have at most the effort of the search with one group of layers.

    Args:
        request: a request with one placement, and with one value in the field `recomputes`.

    Returns:
        The schedule, whose operations are computations and copies only.

    Raises:
        UnknownSchedule: no schedule has this name.
        Infeasible: no schedule of this name fits in the memory limit.
        ScheduleError: the request is inconsistent, or has an option that the schedule does not support.
    """
    request = request.checked()
    schedule = _before_fusing(request)
    # Named schedules keep their published orders.
    return with_fused_backwards(schedule, request) if request.schedule == "auto" else schedule


def _before_fusing(request: PlanRequest) -> Schedule:
    """The schedule of a checked request, before `with_fused_backwards` fuses B and W."""
    entry = entry_of(request.schedule)
    unplanned = {"offload": request.offloads, "recomputation": request.recompute is Recompute.PLANNED}
    for option, is_asked_for in unplanned.items():
        if is_asked_for and not entry.uses_costs:
            able = ", ".join(name for name, known in ENTRIES.items() if known.uses_costs)
            raise ScheduleError(f"schedule {entry.name} does not plan {option}: choose one of {able}")
    if request.recompute is not Recompute.NONE and entry.has_pairs:
        raise ScheduleError(f"schedule {entry.name} does not recompute: its forwards and backwards run in pairs")
    if not request.offloads or request.limits is None:
        return _without_copies(request)
    best, shortest, smallest = None, inf, inf
    problem = Problem.of(request, request.limits)
    try:
        best = _without_copies(request)
        shortest = cost_of(best, problem)
    except Infeasible as error:
        smallest = error.smallest_limit
    tried = groupings(problem)
    relaxed = replace(request, effort=request.effort // (OFFLOAD_PARTS * len(tried)))

    def plans(limits: Limits) -> Iterator[Schedule]:
        for groups in tried:
            costs = in_groups(problem.costs, groups).at_once()
            with suppress(Infeasible):
                yield replace(_in_one_group(replace(relaxed.within(limits), costs=costs)), groups=groups)
        if request.recompute is Recompute.PLANNED:  # the plan is then never slower than a plan without R
            keeping = replace(relaxed, costs=problem.costs.at_once(), recomputes=(Recompute.NONE,))
            with suppress(Infeasible):
                yield _in_one_group(keeping.within(limits).checked())

    schedule = offloaded(plans, problem, shortest) or best
    if schedule is None:
        raise Infeasible(
            f"no plan with copies to the host fits in the memory limit; without copies, {enough(smallest)}",
            smallest,
        )
    return schedule


def _without_copies(request: PlanRequest) -> Schedule:
    """The schedule for a checked request, without copies of activations to the host."""
    whole = None if request.limits is None else Problem.of(request, request.limits)
    tried = [()] if whole is None else groupings(whole)
    if whole is None or tried == [()]:
        return _in_one_group(replace(request, costs=request.stage_costs.at_once()))
    best, shortest, refused = None, inf, []
    for groups in tried:
        costs = in_groups(whole.costs, groups).at_once()
        problem = replace(whole, costs=costs)
        if best is not None and (request.effort == 0 or problem.bound >= shortest):
            continue
        try:
            effort = request.effort // len(tried) if groups else request.effort
            schedule = _in_one_group(replace(request, costs=costs, effort=effort))
        except Infeasible as error:
            refused.append(error)
            continue
        time = cost_of(schedule, problem)
        if time < shortest * (1 - 1e-9):
            best, shortest = replace(schedule, groups=groups), time
    if best is None:
        raise min(refused, key=lambda error: error.smallest_limit)
    return best


def _in_one_group(request: PlanRequest) -> Schedule:
    """The schedule for a checked request, if every stage recomputes its activations in one group of layers."""
    entry, costs, limits = entry_of(request.schedule), request.stage_costs, request.limits
    # Pairs gain time only if stages exchange tokens between experts.
    pairs = request.pairs and entry.plans_all_kinds and costs.has_all_to_all
    gets_recomputed = request.recompute is Recompute.FULL and not entry.uses_costs

    def search(num_microbatches: int, costs: StageCosts, limits: Limits | None) -> Schedule:
        smaller = replace(request.within(limits), num_microbatches=num_microbatches, costs=costs)
        schedule = entry.function(smaller if entry.takes_limit else smaller.within(None))
        if pairs:
            schedule = with_pairs(entry.name, Problem.of(smaller, limits or peak_memory(schedule, costs)), schedule)
        return with_recomputation(schedule) if gets_recomputed else schedule

    def make(costs: StageCosts) -> Schedule:
        m, overlap = request.num_microbatches, request.overlap_communication
        for fewer in fewer_microbatches(request.placement, m) if entry.plans_all_kinds and not pairs else ():
            with suppress(Infeasible):
                few = search(fewer, costs, without_leftovers(m - fewer))
                schedule = extended(few, m, costs, limits, overlap_communication=overlap)
                if schedule is not None:
                    return schedule
        return search(m, costs, limits)

    def without_leftovers(num_earlier: int) -> Limits | None:
        """The limits less the memory that `num_earlier` microbatches leave allocated until the end of the step."""
        if limits is None:
            return None
        left = (memory_left(costs, request.placement.stages_of(rank)) for rank in range(request.num_ranks))
        return tuple(max(SMALLEST, limit - num_earlier * each) for limit, each in zip(limits, left, strict=True))

    if request.vocabulary_parallel and not entry.plans_all_kinds:
        schedule = with_best_delay(
            make(costs.with_vocabulary_in_weight_gradients()),
            costs,
            limits,
            overlap_communication=request.overlap_communication,
            takes_makespan=request.is_judged_by_makespan,
        )
    else:
        schedule = make(costs)
    if limits is not None:
        # Some generators of schedules ignore memory limits.
        check_within(
            lambda rank: f"on rank {rank} schedule {schedule.name} needs", peak_memory(schedule, costs), limits
        )
    return schedule
