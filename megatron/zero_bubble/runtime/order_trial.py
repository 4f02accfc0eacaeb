"""Compares a planned order of operations with megatron-core's own order for the same layout by running both orders."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.planner.megatrons_split import in_megatrons_order
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import ScheduleError

SMALL_GAIN = 1.05
"""A run also tries megatron-core's order if the planned order's predicted gain over that order is below this factor."""
WORTHWHILE = 1.005
"""After costs have been corrected, a new plan replaces the running plan only if the new plan is faster by this factor.
After a trial of megatron-core's order, the planned order is kept only if it is faster than megatron-core's order by
this factor."""


@dataclass(frozen=True)
class OrderTrial:
    """A trial of megatron-core's own order for a few steps; the run then continues with the faster order.

    Attributes:
        num_microbatches: number of microbatches in each step before the trial.
        own: the schedules of megatron-core's own order.
        planned: the schedules of the planned order.
        planned_span: milliseconds of a step in the planned order.
    """

    num_microbatches: int
    own: RunSchedules
    planned: RunSchedules
    planned_span: float

    def result(self, own_span: float) -> TrialResult:
        """Return the result of a trial in which a step took `own_span` milliseconds in megatron-core's own order."""
        return TrialResult(self.own.name, own_span, self.planned_span)


@dataclass(frozen=True)
class TrialResult:
    """The measured milliseconds of a step in the planned order and in megatron-core's own order."""

    own_name: str
    own_span: float
    planned_span: float

    @property
    def keeps_planned(self) -> bool:
        """Whether the planned order is faster by at least the factor `WORTHWHILE`."""
        return self.planned_span * WORTHWHILE <= self.own_span

    def __str__(self) -> str:
        decision = "goes on" if self.keeps_planned else f"gives way to {self.own_name}"
        return f"{self.own_name} {self.own_span:.1f} ms, the planned order {self.planned_span:.1f} ms: it {decision}"


def own_order(plan: RunSchedules, num_microbatches: int) -> RunSchedules | None:
    """Return the schedules of megatron-core's own order for the layout of a plan.

    Returns:
        The schedules. None if the plan's schedule was read from a file, if megatron-core has no order for this layout,
        or if megatron-core's order exceeds the plan's memory limit.
    """
    request = in_megatrons_order(plan.request)
    if plan.given is not None or request is None:
        return None
    own = RunSchedules(request)
    try:
        own.schedule(num_microbatches)
    except ScheduleError:
        return None
    return own
