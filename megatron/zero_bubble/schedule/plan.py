"""Where a run's schedules come from, and how a schedule is made ready to be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.generators import entry_of, generate, placement_for
from megatron.zero_bubble.schedule.ir import Placement, PlacementKind, Schedule
from megatron.zero_bubble.schedule.lower import lower
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.step_ops import with_post_validation, without_post_validation
from megatron.zero_bubble.schedule.tail import reorder_tail
from megatron.zero_bubble.schedule.validate import validate


@dataclass(frozen=True)
class Plan:
    """What a run's schedules are made from: a generator and its inputs, or one given schedule.

    Attributes:
        name: of the generator, or of the given schedule.
        placement: of all schedules of the plan.
        costs, memory_limit, group_size, recompute, post_validation, vocabulary_parallel: as `generate` takes them.
        given: the only schedule of a plan that was read from a file. It serves one number of microbatches.
    """

    name: str
    placement: Placement
    costs: StageCosts | None = None
    memory_limit: float | Sequence[float] | None = None
    group_size: int | None = None
    given: Schedule | None = None
    recompute: Recompute = Recompute.NONE
    post_validation: bool = False
    vocabulary_parallel: bool = False
    shared: Mapping[int, Schedule] = field(default_factory=dict, repr=False, compare=False)
    """Schedules, by number of microbatches, that one rank has made and all have been told."""
    _made: dict[int, Schedule] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Schedules that this process has made: it may take long."""

    @classmethod
    def named(cls, name: str, num_ranks: int, num_chunks: int | None = None, kind: PlacementKind | None = None) -> Plan:
        """The plan of a generator; arguments as of `placement_for`.

        Raises:
            ScheduleError: it makes no schedule for these ranks, chunks or kind of placement.
        """
        return cls(name, placement_for(name, num_ranks, num_chunks, kind))

    @classmethod
    def of(cls, schedule: Schedule) -> Plan:
        """The plan of one given schedule. Post-validation is removed from it, because `prepare` adds it if wanted."""
        return cls(schedule.name, schedule.placement, given=schedule)

    @property
    def adapts(self) -> bool:
        """Whether other costs make another schedule."""
        return self.given is None and entry_of(self.name).uses_costs

    def with_costs(self, costs: StageCosts, memory_limit: float | Sequence[float] | None) -> Plan:
        """The plan for measured costs; the limit is in their unit."""
        return replace(self, costs=costs, memory_limit=memory_limit, shared={})

    def with_shared(self, schedule: Schedule) -> Plan:
        """The plan with the schedule that all ranks run for its number of microbatches."""
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
        if num_microbatches not in self._made:
            self._made[num_microbatches] = prepare(self._make(num_microbatches), self.costs)
        return self._made[num_microbatches]

    def _make(self, num_microbatches: int) -> Schedule:
        if self.given is None:
            return generate(
                self.name,
                self.placement.num_ranks,
                num_microbatches,
                num_chunks=self.placement.num_chunks,
                placement_kind=self.placement.kind,
                costs=self.costs,
                memory_limit=self.memory_limit,
                group_size=self.group_size,
                post_validation=self.post_validation,
                recompute=self.recompute,
                vocabulary_parallel=self.vocabulary_parallel,
            )
        if num_microbatches != self.given.num_microbatches:
            raise ScheduleError(
                f"schedule {self.name} is for {self.given.num_microbatches} microbatches, not for {num_microbatches}"
            )
        schedule = self.given
        if schedule.is_vocabulary_parallel is not self.vocabulary_parallel:
            has, model = ("no ", "is") if self.vocabulary_parallel else ("", "is not")
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
