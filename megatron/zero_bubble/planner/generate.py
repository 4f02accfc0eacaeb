"""Makes the schedule of a request whose layout is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.planner.periodic import extended, fewer_microbatches
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of, placement_for
from megatron.zero_bubble.planner.request import Limits, PlanRequest
from megatron.zero_bubble.schedule.collector import paused_collector
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.ir import PlacementKind, Schedule
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.shard_ops import with_best_delay


def request_for(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    placement_kind: PlacementKind | None = None,
    recompute: Recompute = Recompute.NONE,
    **options: Any,
) -> PlanRequest:
    """The request for a schedule on a placement of its own.

    Args:
        name: of the schedule, one of `names()`.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of an iteration.
        num_chunks: model chunks a rank; by default the schedule's own number.
        placement_kind: where `auto` has the chunks; by default linear, or interleaved with several chunks.
        recompute: which microbatches have an R.
        options: other fields of `PlanRequest`, such as `costs` and `memory_limit`.

    Raises:
        ScheduleError: there is no such schedule, or it is for another placement.
    """
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"schedule {name} needs at least one rank and one microbatch, got {num_ranks} and {num_microbatches}"
        )
    placement = placement_for(name, num_ranks, num_chunks, placement_kind)
    return PlanRequest(name, num_microbatches, (placement,), recomputes=(recompute,), **options)


def generate(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """The schedule `name`; arguments as of `request_for`, results and errors as of `schedule_of`."""
    return schedule_of(request_for(name, num_ranks, num_microbatches, **options))


@paused_collector()
def schedule_of(request: PlanRequest) -> Schedule:
    """The schedule of a request whose layout is given, without communication.

    Raises:
        UnknownSchedule: there is no such schedule.
        Infeasible: no schedule of this kind fits under the memory limit.
        ScheduleError: anything else that is wrong.
    """
    name, entry = request.schedule, entry_of(request.schedule)
    request = request.checked()
    placement, num_microbatches, recompute = request.placement, request.num_microbatches, request.recompute
    if recompute is Recompute.PLANNED and not entry.uses_costs:
        able = ", ".join(name for name, one in ENTRIES.items() if one.uses_costs)
        raise ScheduleError(f"schedule {name} does not plan recomputation: choose one of {able}")
    gets_recomputed = recompute is Recompute.FULL and not entry.uses_costs

    def search(num_microbatches: int, costs: StageCosts, limits: Limits | None) -> Schedule:
        schedule = entry.function(replace(request, num_microbatches=num_microbatches, costs=costs, memory_limit=limits))
        return with_recomputation(schedule) if gets_recomputed else schedule

    def make(costs: StageCosts, limits: Limits | None) -> Schedule:
        for fewer in fewer_microbatches(placement, num_microbatches) if entry.uses_costs else ():
            shorter = search(fewer, costs, limits)
            overlap = request.overlap_communication
            schedule = extended(shorter, num_microbatches, costs, limits, overlap_communication=overlap)
            if schedule is not None:
                return schedule
        return search(num_microbatches, costs, limits)

    costs, limits = request.stage_costs, request.limits
    if request.vocabulary_parallel and not entry.plans_shards:
        schedule = with_best_delay(make(costs.with_vocabulary_in_weight_gradients(), limits), costs, limits)
    else:
        schedule = make(costs, limits)
    if limits is not None:
        _check_memory(schedule, costs, limits)
    return schedule


def _check_memory(schedule: Schedule, costs: StageCosts, limits: Sequence[float]) -> None:
    """Refuse a schedule that needs more than the limit: one whose generator cannot adapt it."""
    peaks = peak_memory(schedule, costs)
    for rank, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
        if peak > limit * (1 + 1e-9):
            raise Infeasible(
                f"on rank {rank} schedule {schedule.name} needs {peak:g} of memory, above the limit of {limit:g}; "
                f"{max(peaks):g} is enough for every rank",
                max(peaks),
            )
