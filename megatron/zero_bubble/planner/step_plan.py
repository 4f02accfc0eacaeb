"""The plan of one step whose microbatches differ in size: a schedule that fits into memory, and their order in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from megatron.zero_bubble.planner.microbatch_order import MicrobatchOrder, order_microbatches
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.pairs import PAIRED
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize, SizedCosts

_PLANNING_SHARE, _MOST_SECONDS = 0.02, 0.025
"""Planning may take about this share of a step, and at most about so many seconds."""
_SECONDS_PER_OPERATION = 0.5e-6
"""Time to simulate one operation; the number of orders that are tried follows from it."""
_FEWEST, _MOST = 12, 200
"""Number of orders that are tried."""


class StepPlan(NamedTuple):
    """A schedule and the order in which it takes a step's microbatches."""

    level: int
    """0 for the schedule that the run has for usual microbatches; above, as in `RunSchedules.in_less_memory`."""
    schedule: Schedule
    order: MicrobatchOrder
    milliseconds: float = 0.0
    """Time of planning."""


class StepRules(NamedTuple):
    """The schedules, limits and freedoms that all steps of a run share."""

    plan: RunSchedules
    """The schedules of the run, without post-validation."""
    limits: tuple[float, ...] | None = None
    """Bytes that the operations of every rank may need; None for no limit."""
    reorders: bool = True
    """Whether microbatches may run in another order than that of the data."""
    interlocks: bool = False
    """Whether iterations interlock."""


@dataclass(frozen=True)
class StepProblem:
    """A step to plan.

    Attributes:
        rules: shared by all steps of the run.
        costs: by size of a microbatch.
        sizes: of the microbatches, in the order of the data.
    """

    rules: StepRules
    costs: SizedCosts
    sizes: tuple[MicrobatchSize, ...]

    @property
    def is_open(self) -> bool:
        """Whether there is something to decide: microbatches differ or may not fit, and none run as a pair."""
        differs = self.rules.limits is not None or len(set(self.sizes)) > 1
        return differs and self.rules.plan.schedule(len(self.sizes)).kinds.isdisjoint(PAIRED)

    def is_as(self, other: StepProblem) -> bool:
        """Whether the other problem has the same plan; costs and schedules have to be the same objects."""
        same = self.costs is other.costs and self.rules.plan is other.rules.plan
        return same and self.sizes == other.sizes and self.rules[1:] == other.rules[1:]

    def solve(self, least_level: int = 0) -> StepPlan:
        """Plan the step, with the same result for the same problem; arguments and errors as of `plan_step`."""
        begin, rules, inside = time.perf_counter(), self.rules, self.costs.inside
        costs = [self.costs.of(size) for size in self.sizes]
        planned = plan_step(
            rules.plan,
            costs,
            least_level=least_level,
            limits=rules.limits,
            inside=[[curve.at(size) for curve in inside] for size in self.sizes] if inside else (),
            names=[f"microbatch {number} ({size.tokens} tokens)" for number, size in enumerate(self.sizes)],
            num_tried=_num_tried(costs) if rules.reorders else 1,
            interlocks=rules.interlocks,
        )
        return planned._replace(milliseconds=1000.0 * (time.perf_counter() - begin))


def _num_tried(costs: Sequence[StageCosts]) -> int:
    """The number of orders that are tried for a step of microbatches of these costs."""
    num_stages = costs[0].num_stages
    longest = max(sum(each.work(stage) for each in costs) for stage in range(num_stages))
    seconds, each = _PLANNING_SHARE * longest / 1000.0, 3 * num_stages * len(costs) * _SECONDS_PER_OPERATION
    return min(max(_FEWEST, round(min(seconds, _MOST_SECONDS) / each)), _MOST)


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
