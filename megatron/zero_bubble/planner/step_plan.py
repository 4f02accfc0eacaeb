"""The plan of one step whose microbatches differ in size: a schedule that fits into memory, and their order in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from megatron.zero_bubble.planner.microbatch_order import MicrobatchOrder, order_microbatches
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.ir import Schedule


class StepPlan(NamedTuple):
    """A schedule and the order in which it takes a step's microbatches."""

    level: int
    """0 for the schedule that the run has for usual microbatches; above, as in `RunSchedules.in_less_memory`."""
    schedule: Schedule
    order: MicrobatchOrder


def plan_step(plan: RunSchedules, costs: Sequence[StageCosts], *, least_level: int = 0, **options: Any) -> StepPlan:
    """Plan a step: the run's own schedule if its microbatches fit in some order, else one for less memory.

    Args:
        plan: the schedules of the run.
        costs: of the stages, for each microbatch in the order of the data.
        least_level: level of memory from which a schedule is looked for.
        options: those of `order_microbatches`.

    Raises:
        Infeasible: the microbatches do not fit into the limits even one after the other.
    """
    problem: Infeasible | None = None
    for level in count(least_level):
        schedule = plan.in_less_memory(len(costs), level) if level else plan.schedule(len(costs))
        if schedule is None:
            break
        try:
            return StepPlan(level, schedule, order_microbatches(schedule, costs, **options))
        except Infeasible as error:
            problem = error
    assert problem is not None, "levels of memory have an end, which other ranks have found too"
    raise problem
