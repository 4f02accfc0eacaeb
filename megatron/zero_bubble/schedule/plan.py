"""Where a run's schedules come from: a `Plan` makes one for each number of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.generators import entry_of, generate, placement_for
from megatron.zero_bubble.schedule.ir import Placement, Schedule
from megatron.zero_bubble.schedule.lower import lower
from megatron.zero_bubble.schedule.step_ops import without_post_validation
from megatron.zero_bubble.schedule.validate import validate


class Plan(Protocol):
    """A source of schedules, all for one placement."""

    @property
    def name(self) -> str: ...

    @property
    def placement(self) -> Placement: ...

    def schedule(self, num_microbatches: int) -> Schedule:
        """A lowered, valid schedule. Raises `ScheduleError` if there is none for this many microbatches."""
        ...


@dataclass(frozen=True)
class NamedPlan:
    """The schedules of one generator.

    `num_chunks`, `costs`, `memory_limit` and `group_size` are those of `generate`.
    """

    name: str
    num_ranks: int
    num_chunks: int | None = None
    costs: StageCosts | None = None
    memory_limit: float | Sequence[float] | None = None
    group_size: int | None = None

    @property
    def placement(self) -> Placement:
        return placement_for(self.name, self.num_ranks, self.num_chunks)

    @property
    def adapts(self) -> bool:
        """Whether the generator makes another schedule for other costs."""
        return entry_of(self.name).uses_costs

    def with_costs(self, costs: StageCosts, memory_limit: float | Sequence[float] | None) -> NamedPlan:
        """The plan for measured costs; the limit is in their unit."""
        return replace(self, costs=costs, memory_limit=memory_limit)

    def schedule(self, num_microbatches: int) -> Schedule:
        made = generate(
            self.name,
            self.num_ranks,
            num_microbatches,
            num_chunks=self.num_chunks,
            costs=self.costs,
            memory_limit=self.memory_limit,
            group_size=self.group_size,
        )
        return _ready(made, self.costs)


@dataclass(frozen=True)
class FixedPlan:
    """One schedule, from a file for example; it serves one number of microbatches.

    Like every plan's, its schedules are without post-validation, whatever was given: who runs them adds that.
    """

    given: Schedule

    @property
    def name(self) -> str:
        return self.given.name

    @property
    def placement(self) -> Placement:
        return self.given.placement

    def schedule(self, num_microbatches: int) -> Schedule:
        if num_microbatches != self.given.num_microbatches:
            raise ScheduleError(
                f"schedule {self.name} is for {self.given.num_microbatches} microbatches, not for {num_microbatches}"
            )
        if self.given.has_post_validation:
            validate(self.given)
            return _ready(without_post_validation(self.given))
        return _ready(self.given)


def _ready(schedule: Schedule, costs: StageCosts | None = None) -> Schedule:
    lowered = schedule if schedule.is_lowered else lower(schedule, costs=costs)
    validate(lowered)
    return lowered
