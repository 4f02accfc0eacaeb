"""The schedules of a training run, and the function that lowers and validates schedules for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.zero_bubble.planner.generate import request_for, schedule_of
from megatron.zero_bubble.planner.orders import one_by_one, schedule_of_orders
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.registry import entry_of
from megatron.zero_bubble.planner.request import PlanRequest
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.ir import Placement, PlacementKind, Schedule
from megatron.zero_bubble.schedule.kinds import POST_VALIDATION
from megatron.zero_bubble.schedule.lower import lower
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.step_ops import with_post_validation
from megatron.zero_bubble.schedule.tail import reorder_tail
from megatron.zero_bubble.schedule.validate import validate

_ONE_BY_ONE = "one-by-one"
"""Name of the last memory level's schedule, which runs one microbatch at a time (see `RunSchedules.in_less_memory`)."""
_CANDIDATES = 20
"""Number of candidate orders for a schedule that needs less memory; small, because a step waits for the schedule."""


@dataclass(frozen=True)
class RunSchedules:
    """The schedules of a training run: one for each number of microbatches, from a request or a file.

    Attributes:
        request: a request for one layout; each schedule is made with its own number of microbatches in place of the
            request's number.
        fixed_schedule: a schedule that was read from a file, for one number of microbatches; None without a file.
        shared: number of microbatches -> schedule that one rank has made and all ranks have received.
        watch: (name of the schedule, number of microbatches) -> context manager in which this process makes the
            schedule; None to make the schedule without a context manager.
    """

    request: PlanRequest
    fixed_schedule: Schedule | None = None
    shared: Mapping[int, Schedule] = field(default_factory=dict, repr=False, compare=False)
    watch: Callable[[str, int], AbstractContextManager[Any]] | None = field(default=None, repr=False, compare=False)
    _cache: dict[tuple[int, int], Schedule] = field(default_factory=dict, init=False, repr=False, compare=False)
    """(number of microbatches, memory level) -> schedule that this process has made."""

    @classmethod
    def named(
        cls, name: str, num_ranks: int, num_chunks: int | None = None, kind: PlacementKind | None = None
    ) -> RunSchedules:
        """The schedules of a run that uses the schedule `name` of the registry, such as `zb-h1`.

        `named` takes the same arguments as `placement_for`.

        Raises:
            ScheduleError: no schedule has this name, or the schedule does not support the ranks, chunks or placement.
        """
        return cls(request_for(name, num_ranks, 1, num_chunks=num_chunks, placement_kind=kind))

    @classmethod
    def of(cls, schedule: Schedule) -> RunSchedules:
        """The schedules of a run that uses only `schedule`, for one number of microbatches."""
        request = PlanRequest(schedule.name, schedule.num_microbatches, (schedule.placement,))
        return cls(request, fixed_schedule=schedule)

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
        return self.request.offloads or (self.fixed_schedule is not None and self.fixed_schedule.offloads)

    @property
    def costs(self) -> StageCosts | None:
        """The costs from which the schedules are made; None for `default_costs`."""
        return None if self.request.costs is None else self.request.stage_costs

    @property
    def adapts(self) -> bool:
        """Whether the schedules depend on the costs."""
        return self.fixed_schedule is None and entry_of(self.name).uses_costs

    def requesting(self, **changes: Any) -> RunSchedules:
        """A copy of this `RunSchedules` with `changes` to the fields of the request, and without shared schedules."""
        return replace(self, request=replace(self.request, **changes), shared={})

    def with_shared(self, schedule: Schedule) -> RunSchedules:
        """Return a copy of this `RunSchedules` with one more shared schedule, which all ranks have received."""
        return replace(self, shared={**self.shared, schedule.num_microbatches: schedule})

    def schedule(self, num_microbatches: int) -> Schedule:
        """The schedule for a number of microbatches, lowered and validated.

        Raises:
            ScheduleError: no schedule can be made for this number of microbatches.
        """
        if num_microbatches in self.shared:
            return self.shared[num_microbatches]
        key = num_microbatches, 0
        if key not in self._cache:
            with nullcontext() if self.watch is None else self.watch(self.name, num_microbatches):
                self._cache[key] = prepare(self._make(num_microbatches), self.costs)
        return self._cache[key]

    def for_evaluation(self, num_microbatches: int) -> Schedule:
        """A schedule for an evaluation of a number of microbatches that the run's own schedule does not support.

        The schedule is planned for default costs without a memory limit, because an evaluation keeps no activations.
        """
        spreads = self.request.vocabulary_parallel
        request = PlanRequest("auto", num_microbatches, (self.placement,), vocabulary_parallel=spreads)
        return prepare(schedule_of(request))

    def in_less_memory(self, num_microbatches: int, level: int) -> Schedule | None:
        """A schedule that needs less memory than the usual schedule, for steps with larger microbatches than usual.

        Args:
            num_microbatches: number of microbatches of the step.
            level: memory level, at least 1. The memory limit of the request is divided by 2 ** (level / 2). The
                schedule of the last memory level runs one microbatch at a time.

        Returns:
            The schedule that needs less memory; None beyond the last memory level, without a memory limit, or if the
            run's schedules do not depend on costs.
        """
        limits, key = self.request.limits, (num_microbatches, level)
        if not self.adapts or limits is None:
            return None
        if key not in self._cache:
            before = self._cache.get((num_microbatches, level - 1))
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
                schedule = replace(schedule_of_orders(problem, one_by_one(problem)), name=_ONE_BY_ONE)
            self._cache[key] = prepare(schedule, self.costs)
        return self._cache[key]

    def _make(self, num_microbatches: int) -> Schedule:
        if self.fixed_schedule is None:
            return schedule_of(replace(self.request, num_microbatches=num_microbatches))
        if num_microbatches != self.fixed_schedule.num_microbatches:
            raise ScheduleError(
                f"schedule {self.name} is for {self.fixed_schedule.num_microbatches} microbatches, "
                f"not for {num_microbatches}"
            )
        schedule = self.fixed_schedule
        if schedule.is_vocabulary_parallel is not self.request.vocabulary_parallel:
            negation, model = ("no ", "is") if self.request.vocabulary_parallel else ("", "is not")
            raise ScheduleError(
                f"schedule {self.name} has {negation}operations on vocabulary shards, but the model {model} "
                "vocabulary parallel"
            )
        if schedule.has_post_validation:
            validate(schedule)
            schedule = schedule.without(POST_VALIDATION)
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
    """Lower and validate a schedule, so that ranks can run the schedule. A schedule that already has sends and receives
    is not lowered again.

    Args:
        schedule: a schedule with or without sends and receives.
        costs: stage costs that determine where receives, collectives and VALIDATE are inserted; None for
            `default_costs`.
        forward_only: whether only the forwards are kept, for an evaluation. `orders_tail` and `post_validation` have no
            effect on an evaluation.
        orders_tail: whether each rank runs its last W grouped by chunk, so that the executor can run these W parameter
            by parameter. The gradient of one parameter can then be reduced while the gradients of other parameters are
            computed.
        post_validation: whether STEP and VALIDATE are added to the schedule.

    Raises:
        InvalidSchedule: the ranks would deadlock or compute a wrong result.
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
