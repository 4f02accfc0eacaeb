"""Defines the settings with which a run plans schedules, and the report of a decision about a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.zero_bubble.planner.memory_limit import MemoryLimit
from megatron.zero_bubble.planner.prediction import MegatronsTime, Prediction
from megatron.zero_bubble.runtime.order_trial import TrialResult
from megatron.zero_bubble.runtime.plan_check import Difference
from megatron.zero_bubble.schedule.formats import Profile, Setting


@dataclass(frozen=True)
class PlanningOptions:
    """Settings of a run's profiling and planning.

    Attributes:
        first_step: the first step that is profiled, unless `profile` is given.
        last_step: the last step that is profiled; 0 if no step is profiled.
        model: the model's settings on which the costs depend.
        memory_limit: the memory limit of the run; None if the schedule determines its own limit.
        profile: measured costs from which the run plans before the first step.
        threshold: the run plans again if the relative change of a stage's time exceeds `threshold`; with 0, the run
            never plans again for this reason.
        limits: memory limit of each rank in bytes, if the layout was chosen under memory limits per rank. `limits`
            override `memory_limit`.
        megatrons: the step time with Megatron's split of layers; reports compare the step time of the chosen layout
            with this time.
        tries_own_order: whether the run also measures megatron-core's own order of operations, if the predicted gain
            of the planned order is small.
    """

    first_step: int = 0
    last_step: int = 0
    model: Mapping[str, Setting] = field(default_factory=dict)
    memory_limit: MemoryLimit | None = None
    profile: Profile | None = None
    threshold: float = 0.0
    limits: tuple[float, ...] | None = None
    megatrons: MegatronsTime | None = None
    tries_own_order: bool = False

    @property
    def has_costs(self) -> bool:
        """Whether costs are measured or given."""
        return self.last_step > 0 or self.profile is not None

    @property
    def has_absolute_limit(self) -> bool:
        """Whether the memory limit is a number of bytes or `auto`, rather than a multiple of the memory of 1F1B."""
        return self.memory_limit is not None and self.memory_limit.multiple is None

    @property
    def limit_includes_inside(self) -> bool:
        """Whether the memory limit includes the temporary memory of an operation.

        The limits of a layout that was chosen under a multiple of 1F1B's memory are for activations alone.
        """
        return self.limits is None or self.has_absolute_limit

    @property
    def needs_free_memory(self) -> bool:
        """Whether the free memory of the devices is the memory limit."""
        return self.limits is None and self.memory_limit is not None and self.memory_limit.is_auto


@dataclass(frozen=True)
class Report:
    """A decision of the `Replanner` about the plan of a run, for the run's log."""

    prediction: Prediction
    is_new_plan: bool
    """Whether the schedule was planned from the costs of `prediction`; if not, the costs serve only for predictions."""
    memory_limit: tuple[float, ...] | None
    """The memory limit of every rank, in bytes; None for the schedule's own limit."""
    step: int
    """Number of the last step that was measured for the costs; 0 if the user gave the costs."""
    differences: tuple[Difference, ...] = ()
    """Differences between the measured times and the times from which the previous plan was made."""
    ratio_of_pairs: float | None = None
    """Time of F and B as a pair, divided by the time of F and B one after the other; None without measured pairs."""
    trial: TrialResult | None = None
    """Result of the trial that compared the planned order with megatron-core's own order; None without a result."""
