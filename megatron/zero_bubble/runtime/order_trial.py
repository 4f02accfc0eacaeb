"""Compares a planned order of operations with megatron-core's own order for the same layout by running both orders."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.planner.megatrons_split import in_megatrons_order
from megatron.zero_bubble.planner.prediction import MegatronsTime, work_of_stages
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import ScheduleError, StageCosts

SMALL_GAIN = 1.05
"""A run also tries megatron-core's order if the predicted speedup of the planned order is below this factor."""
WORTHWHILE = 1.005
"""Least speedup at which a new plan replaces the current plan, and at which a trial keeps the planned order."""


@dataclass(frozen=True)
class OrderTrial:
    """A trial of megatron-core's order for a few steps, after which the run continues with the faster order.

    The planned order runs before and after megatron-core's order, so that a gradual change of the machine's speed
    favors neither order.

    Attributes:
        num_microbatches: number of microbatches in each step before the trial.
        baseline: the schedules of megatron-core's own order.
        planned: the schedules of the planned order.
        span_before: mean duration of a step in the planned order before the trial, in milliseconds.
        baseline_span: mean duration of a step in megatron-core's own order, in milliseconds; None if not measured yet.
        baseline_costs: the measured costs of the stages in megatron-core's own order; None before the measurement.
    """

    num_microbatches: int
    baseline: RunSchedules
    planned: RunSchedules
    span_before: float
    baseline_span: float | None = None
    baseline_costs: StageCosts | None = None


@dataclass(frozen=True)
class TrialResult:
    """The measured step times in milliseconds, in the planned order and in megatron-core's own order."""

    baseline_name: str
    baseline_span: float
    planned_span: float

    @property
    def keeps_planned(self) -> bool:
        """Whether the planned order is faster than megatron-core's order by at least the factor `WORTHWHILE`."""
        return self.planned_span * WORTHWHILE <= self.baseline_span

    def megatrons_time(self, milliseconds: float, costs: StageCosts) -> MegatronsTime:
        """Predict the step time in megatron-core's own order.

        The prediction is `milliseconds` (the predicted step time in the planned order) times the ratio of the measured
        step times, `baseline_span / planned_span`.
        """
        step_time = milliseconds * self.baseline_span / self.planned_span
        return MegatronsTime(step_time, work_of_stages(costs), is_same_layout=True)

    def __str__(self) -> str:
        order = "the planned order" if self.keeps_planned else self.baseline_name
        spans = f"{self.baseline_name} {self.baseline_span:.1f} ms, the planned order {self.planned_span:.1f} ms"
        return f"{spans}: continuing with {order}"


def own_order(plan: RunSchedules, num_microbatches: int) -> RunSchedules | None:
    """Return the schedules of megatron-core's own order for the layout of a plan.

    Returns:
        The schedules, or None if the plan's schedule was read from a file, if megatron-core has no order for the layout
        and the number of microbatches, or if megatron-core's order exceeds the plan's memory limit.
    """
    request = in_megatrons_order(plan.request)
    if plan.fixed_schedule is not None or request is None:
        return None
    own = RunSchedules(request)
    try:
        own.schedule(num_microbatches)
    except ScheduleError:
        return None
    return own
