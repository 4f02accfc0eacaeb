"""The settings of a run's planning, and the reports about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.zero_bubble.planner.memory_limit import MemoryLimit
from megatron.zero_bubble.planner.prediction import MegatronsTime, Prediction
from megatron.zero_bubble.runtime.order_trial import TrialResult
from megatron.zero_bubble.runtime.plan_check import Difference
from megatron.zero_bubble.schedule.formats import Profile, Setting

ModelDescription = Mapping[str, Setting]


@dataclass(frozen=True)
class PlanningOptions:
    """Settings of a run's profiling and planning.

    Attributes:
        first_step, last_step: the steps that are profiled, both included, unless a profile is given.
        model: the settings of the model that the costs depend on.
        memory_limit: None for the schedule's own.
        profile: costs to plan with before the first step.
        threshold: relative change of a stage's time that starts planning again; 0 for never.
        limits: bytes that the operations of every rank may need, where its layout was chosen under that limit; they
            come before `memory_limit`.
        megatrons: what the layout is compared with, if it was chosen in place of Megatron's split.
        tries_own_order: whether a plan with a small predicted gain is compared with megatron-core's own order by
            running both.
    """

    first_step: int
    last_step: int
    model: ModelDescription
    memory_limit: MemoryLimit | None = None
    profile: Profile | None = None
    threshold: float = 0.0
    limits: tuple[float, ...] | None = None
    megatrons: MegatronsTime | None = None
    tries_own_order: bool = False

    @property
    def has_absolute_limit(self) -> bool:
        """Whether the memory limit is in bytes, or all that is free, and not a multiple of the memory of 1F1B."""
        return self.memory_limit is not None and self.memory_limit.multiple is None


@dataclass(frozen=True)
class Report:
    """One decision of the `Replanner`, for the log."""

    prediction: Prediction
    is_new_plan: bool
    """Whether the schedule was made from the costs; otherwise they are only used to predict."""
    memory_limit: tuple[float, ...] | None
    """The memory limit of every rank, in bytes; None for the schedule's own."""
    step: int
    """The last step whose times are in the costs; 0 if the costs were given."""
    differences: tuple[Difference, ...] = ()
    """Differences between measured times and the times in the costs of the previous plan."""
    ratio_of_pairs: float | None = None
    """How many times as long F and B take as one operation as one after the other; None if that was not measured."""
    trial: TrialResult | None = None
    """The measured times of the planned order and of megatron-core's own; None if they were not compared."""
