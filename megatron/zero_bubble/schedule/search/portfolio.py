"""Chooses between candidates: plans, within a budget, and whole schedules, by simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.search.event_loop import GapRule, PlannedOrders
from megatron.zero_bubble.schedule.search.fill import Keeping, fill_weights, run_in_order
from megatron.zero_bubble.schedule.search.greedy import Policy, list_schedule
from megatron.zero_bubble.schedule.search.problem import Order, Problem, tolerance
from megatron.zero_bubble.schedule.simulate import simulate

GREEDY_WEIGHT = 3
"""How much longer `list_schedule` takes for an operation than `fill_weights`."""


class Portfolio:
    """The best plan so far of a search that stops at a lower bound, or when its budget is spent.

    The budget counts operations planned, and not seconds, so that every rank of a job finds the same schedule.
    """

    def __init__(self, bound: float, budget: int) -> None:
        self.bound = bound
        self.budget = budget
        self.best: PlannedOrders | None = None

    @property
    def cost(self) -> float:
        """The cost of the best plan; infinity before there is one."""
        return self.best.cost if self.best is not None else float("inf")

    @property
    def finished(self) -> bool:
        """Whether the bound is reached or the budget spent."""
        return self.budget <= 0 or self.cost <= self.bound * (1 + 1e-9)

    def offer(self, plan: PlannedOrders | None) -> None:
        """Keep `plan` if it is better than the best so far."""
        if plan is not None and plan.cost < self.cost * (1 - 1e-12):
            self.best = plan

    def fill(
        self,
        problem: Problem,
        orders: Sequence[Order],
        rule: GapRule,
        target: float = 0,
        keeping: Keeping | None = None,
    ) -> float:
        """Try an order of F and B; its cost, infinity if it does not work."""
        self.budget -= problem.num_ops
        plan = fill_weights(problem, orders, rule, target, keeping)
        self.offer(plan)
        return plan.cost if plan is not None else float("inf")

    def greedy(self, problem: Problem, policy: Policy) -> None:
        """Try a policy."""
        self.budget -= GREEDY_WEIGHT * problem.num_ops
        self.offer(list_schedule(problem, policy))

    def in_order(self, problem: Problem, orders: Sequence[Order]) -> None:
        """Try complete orders."""
        self.budget -= problem.num_ops
        self.offer(run_in_order(problem, orders))


def fits(schedule: Schedule, problem: Problem) -> bool:
    """Whether no rank needs more memory than the problem's limits."""
    peaks = peak_memory(schedule, problem.costs)
    return all(peak <= limit + tolerance(limit) for peak, limit in zip(peaks, problem.limits, strict=True))


def best_of(schedules: Iterable[Schedule], problem: Problem) -> Schedule:
    """The schedule whose longest span is shortest; of equals the one with the shortest makespan, or the first."""
    timelines = [
        simulate(schedule, problem.costs, overlap_communication=problem.overlap_communication) for schedule in schedules
    ]
    shortest = min(timeline.cost for timeline in timelines)
    equals = [timeline for timeline in timelines if timeline.cost <= shortest + tolerance(shortest)]
    return min(equals, key=lambda timeline: timeline.makespan).schedule
