"""Plans one step whose microbatches differ in size: a schedule that fits in memory, and an order of microbatches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from megatron.zero_bubble.planner.memory_limit import bytes_with_unit
from megatron.zero_bubble.planner.microbatch_order import MicrobatchOrder, order_microbatches
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Infeasible
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.simulate import simulates_lengths
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize, SizedCosts

_PLANNING_SHARE, _MOST_SECONDS = 0.02, 0.025
"""Approximate limits on the planning time of a step: a fraction of the step time, and a number of seconds."""
_SECONDS_PER_OPERATION = 0.5e-6
"""Approximate number of seconds to simulate one operation; the number of orders to try depends on this time."""
_FEWEST, _MOST = 12, 200
"""Smallest and largest number of microbatch orders to try for a step."""


class StepPlan(NamedTuple):
    """A schedule, and the order in which the schedule runs the microbatches of a step."""

    level: int
    """Memory level of the schedule: 0 for the run's usual schedule, otherwise as in `RunSchedules.in_less_memory`."""
    schedule: Schedule
    order: MicrobatchOrder
    milliseconds: float = 0.0
    """Milliseconds that planning the step took."""


class StepRules(NamedTuple):
    """The schedules, limits and options that all steps of a run share."""

    plan: RunSchedules
    """The schedules of the run, without post-validation."""
    limits: tuple[float, ...] | None = None
    """Rank -> memory limit of its operations in bytes; None for no limit."""
    reorders: bool = True
    """Whether microbatches may run in an order that differs from the order of the data."""
    interlocks: bool = False
    """Whether a rank starts the next iteration before all ranks have finished, as with post-validation."""


@dataclass(frozen=True)
class StepProblem:
    """A step whose schedule and order of microbatches have to be planned.

    Attributes:
        rules: schedules, limits and options of the run.
        costs: costs of the stages for microbatches of any size.
        sizes: sizes of the microbatches, in the order of the data.
    """

    rules: StepRules
    costs: SizedCosts
    sizes: tuple[MicrobatchSize, ...]

    @property
    def is_open(self) -> bool:
        """Whether the step has to be planned.

        A step is planned if its microbatches differ in size or if there are memory limits, unless its schedule runs
        forwards and backwards in pairs, or copies activations to the host.
        """
        differs = self.rules.limits is not None or len(set(self.sizes)) > 1
        return differs and simulates_lengths(self.rules.plan.schedule(len(self.sizes)))

    def is_as(self, other: StepProblem) -> bool:
        """Whether `other` has the same sizes, limits, options, costs and schedules, and therefore the same plan."""
        same = self.costs is other.costs and self.rules.plan is other.rules.plan
        return same and self.sizes == other.sizes and self.rules[1:] == other.rules[1:]

    def solve(self, least_level: int = 0) -> StepPlan:
        """Plan the step; all ranks make the same plan from the same problem.

        Args:
            least_level: first memory level to try (see `StepPlan.level`).

        Raises:
            Infeasible: the microbatches exceed the memory limits even if one microbatch runs at a time.
        """
        start, rules, inside = time.perf_counter(), self.rules, self.costs.inside
        costs = [self.costs.of(size) for size in self.sizes]
        planned = plan_step(
            rules.plan,
            costs,
            least_level=least_level,
            limits=rules.limits,
            inside=[[curve.at(size) for curve in inside] for size in self.sizes] if inside else (),
            names=[f"microbatch {number} ({size.tokens} tokens)" for number, size in enumerate(self.sizes)],
            memory_text=bytes_with_unit,
            num_tried=_num_tried(costs) if rules.reorders else 1,
            interlocks=rules.interlocks,
        )
        return planned._replace(milliseconds=1000.0 * (time.perf_counter() - start))


def _num_tried(costs: Sequence[StageCosts]) -> int:
    """The number of microbatch orders to try for a step, given the costs of the step's microbatches."""
    num_stages = costs[0].num_stages
    longest = max(sum(each.work(stage) for each in costs) for stage in range(num_stages))
    seconds, each = _PLANNING_SHARE * longest / 1000.0, 3 * num_stages * len(costs) * _SECONDS_PER_OPERATION
    return min(max(_FEWEST, round(min(seconds, _MOST_SECONDS) / each)), _MOST)


def plan_step(plan: RunSchedules, costs: Sequence[StageCosts], *, least_level: int = 0, **options: Any) -> StepPlan:
    """Plan a step with the run's usual schedule if the step's microbatches fit in memory in some order, otherwise with
    a schedule that needs less memory.

    Args:
        options: keyword arguments of `order_microbatches`.

    Raises:
        Infeasible: the microbatches exceed the memory limits even if one microbatch runs at a time.
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
    assert problem is not None, "the lowest level of memory has a schedule"
    raise problem
