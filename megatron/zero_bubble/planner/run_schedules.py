"""Where a run's schedules come from, and how a schedule is made ready to be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.zero_bubble.planner.generate import request_for, schedule_of
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.registry import entry_of
from megatron.zero_bubble.planner.request import PlanRequest
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.ir import Placement, PlacementKind, Schedule
from megatron.zero_bubble.schedule.lower import lower
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.step_ops import with_post_validation, without_post_validation
from megatron.zero_bubble.schedule.tail import reorder_tail
from megatron.zero_bubble.schedule.validate import validate

_ONE_BY_ONE = "one-by-one"
"""Name of the schedule of the last level of memory."""
_CANDIDATES = 20
"""Candidates among which a schedule for less memory is chosen, while a step waits for it."""


@dataclass(frozen=True)
class RunSchedules:
    """The schedules of a run: one for each number of microbatches, all made from one request, or one that is given.

    Attributes:
        request: of one layout; the number of microbatches in it is replaced by that of each schedule.
        given: the only schedule of a run that reads it from a file. It serves one number of microbatches.
        shared: schedules, by number of microbatches, that one rank has made and all have been told.
    """

    request: PlanRequest
    given: Schedule | None = None
    shared: Mapping[int, Schedule] = field(default_factory=dict, repr=False, compare=False)
    _made: dict[tuple[int, int], Schedule] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Schedules that this process has made, which may take long, by number of microbatches and level of memory."""

    @classmethod
    def named(
        cls, name: str, num_ranks: int, num_chunks: int | None = None, kind: PlacementKind | None = None
    ) -> RunSchedules:
        """The schedules of the registry with this name; arguments as of `placement_for`.

        Raises:
            ScheduleError: there is none for these ranks, chunks or kind of placement.
        """
        return cls(request_for(name, num_ranks, 1, num_chunks=num_chunks, placement_kind=kind))

    @classmethod
    def of(cls, schedule: Schedule) -> RunSchedules:
        """One given schedule. Post-validation is removed from it, because `prepare` adds it if wanted."""
        request = PlanRequest(schedule.name, schedule.num_microbatches, (schedule.placement,))
        return cls(request, given=schedule)

    @property
    def name(self) -> str:
        return self.request.schedule

    @property
    def placement(self) -> Placement:
        return self.request.placement

    @property
    def recompute(self) -> Recompute:
        return self.request.recompute

    @property
    def offloads(self) -> bool:
        """Whether schedules may copy activations to the host."""
        return self.request.offloads or (self.given is not None and self.given.offloads)

    @property
    def costs(self) -> StageCosts | None:
        """The costs that the schedules are made from; None for `default_costs`."""
        return None if self.request.costs is None else self.request.stage_costs

    @property
    def adapts(self) -> bool:
        """Whether other costs make another schedule."""
        return self.given is None and entry_of(self.name).uses_costs

    def requesting(self, **changes: Any) -> RunSchedules:
        """The schedules of the same request with other values of these fields."""
        return replace(self, request=replace(self.request, **changes), shared={})

    def with_shared(self, schedule: Schedule) -> RunSchedules:
        """The same schedules, with the one that all ranks run for its number of microbatches."""
        return replace(self, shared={**self.shared, schedule.num_microbatches: schedule})

    def is_shared(self, num_microbatches: int) -> bool:
        """Whether all ranks have the same schedule for this many microbatches."""
        return num_microbatches in self.shared

    def schedule(self, num_microbatches: int) -> Schedule:
        """The schedule for this many microbatches, with messages, valid.

        Raises:
            ScheduleError: there is none.
        """
        if num_microbatches in self.shared:
            return self.shared[num_microbatches]
        key = num_microbatches, 0
        if key not in self._made:
            self._made[key] = prepare(self._make(num_microbatches), self.costs)
        return self._made[key]

    def in_less_memory(self, num_microbatches: int, level: int) -> Schedule | None:
        """A schedule that needs less memory than `schedule`, for steps whose microbatches are larger than usual.

        It keeps the memory limit over the square root of 2, `level` times, with R where the request allows it. The last
        level runs one microbatch after the other.

        Returns:
            The schedule; None beyond the last level, or without a limit to lower.
        """
        limits, key = self.request.limits, (num_microbatches, level)
        if not self.adapts or limits is None:
            return None
        if key not in self._made:
            before = self._made.get((num_microbatches, level - 1))
            if before is not None and before.name == _ONE_BY_ONE:
                return None
            request = replace(
                self.request.within(tuple(limit / 2 ** (level / 2) for limit in limits)),
                num_microbatches=num_microbatches,
                effort=min(self.request.effort, _CANDIDATES * 3 * self.placement.num_stages * num_microbatches),
                spread=0.0,
                time_between=0.0,
            )
            try:
                schedule = schedule_of(request)
            except Infeasible:
                problem = Problem.of(request.checked(), limits)
                schedule = replace(problem.schedule(problem.one_by_one()), name=_ONE_BY_ONE)
            self._made[key] = prepare(schedule, self.costs)
        return self._made[key]

    def _make(self, num_microbatches: int) -> Schedule:
        if self.given is None:
            return schedule_of(replace(self.request, num_microbatches=num_microbatches))
        if num_microbatches != self.given.num_microbatches:
            raise ScheduleError(
                f"schedule {self.name} is for {self.given.num_microbatches} microbatches, not for {num_microbatches}"
            )
        schedule = self.given
        if schedule.is_vocabulary_parallel is not self.request.vocabulary_parallel:
            has, model = ("no ", "is") if self.request.vocabulary_parallel else ("", "is not")
            raise ScheduleError(
                f"schedule {self.name} has {has}operations on vocabulary shards, but the model {model} "
                "vocabulary parallel"
            )
        if schedule.has_post_validation:
            validate(schedule)
            schedule = without_post_validation(schedule)
        if schedule.recomputes and self.recompute is Recompute.NONE:
            raise ScheduleError(f"schedule {self.name} has recomputations (R), but the model keeps all activations")
        if not schedule.recomputes and self.recompute is Recompute.FULL:
            schedule = with_recomputation(schedule)
        return schedule


def prepare(
    schedule: Schedule,
    costs: StageCosts | None = None,
    *,
    forward_only: bool = False,
    orders_tail: bool = False,
    post_validation: bool = False,
) -> Schedule:
    """The schedule as ranks run it: with messages, and valid. Messages that it has already stay in their places.

    Args:
        costs: decide where receives and VALIDATE stand; None for `default_costs`.
        forward_only: leave out all but the forwards, for an evaluation; the options below then have no effect.
        orders_tail: run the last W's of every rank parameter by parameter, so that each gradient is complete early and
            is reduced while the others are computed.
        post_validation: add STEP and VALIDATE.

    Raises:
        InvalidSchedule: the ranks could not run it to its end.
    """
    costs = costs or default_costs(schedule.placement, Recompute.FULL if schedule.recomputes else Recompute.NONE)
    if forward_only:
        schedule = schedule.forward_only()
    elif orders_tail:
        schedule = reorder_tail(schedule)
    if post_validation and not forward_only:
        schedule = with_post_validation(schedule, costs)
    prepared = schedule if schedule.is_lowered else lower(schedule, costs=costs)
    validate(prepared)
    return prepared
