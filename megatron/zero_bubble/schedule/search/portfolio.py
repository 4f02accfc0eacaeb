"""Tries candidates within a budget, and keeps the best."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.schedule.search.clock import Plan
from megatron.zero_bubble.schedule.search.fill import GapRule, fill_weights, run_in_order
from megatron.zero_bubble.schedule.search.greedy import Policy, list_schedule
from megatron.zero_bubble.schedule.search.problem import Order, Problem

GREEDY_WEIGHT = 3
"""How much longer `list_schedule` takes for an operation than `fill_weights`."""


class Portfolio:
    """The best plan so far of a search that stops at a lower bound, or when its budget is spent.

    The budget counts operations planned, and not seconds, so that every rank of a job finds the same schedule.
    """

    def __init__(self, bound: float, budget: int) -> None:
        self.bound = bound
        self.budget = budget
        self.best: Plan | None = None

    @property
    def cost(self) -> float:
        """The cost of the best plan; infinity before there is one."""
        return self.best.cost if self.best is not None else float("inf")

    @property
    def finished(self) -> bool:
        """Whether the bound is reached or the budget spent."""
        return self.budget <= 0 or self.cost <= self.bound * (1 + 1e-9)

    def offer(self, plan: Plan | None) -> bool:
        """Keep `plan` if it is better than the best so far; whether it was."""
        if plan is None or plan.cost >= self.cost * (1 - 1e-12):
            return False
        self.best = plan
        return True

    def fill(self, problem: Problem, orders: Sequence[Order], rule: GapRule, target: float = 0) -> float:
        """Try an order of F and B; its cost, infinity if it does not work."""
        self.budget -= problem.num_ops
        plan = fill_weights(problem, orders, rule, target)
        self.offer(plan)
        return plan.cost if plan is not None else float("inf")

    def greedy(self, problem: Problem, policy: Policy, target: float = 0) -> Plan | None:
        """Try a policy."""
        self.budget -= GREEDY_WEIGHT * problem.num_ops
        plan = list_schedule(problem, policy, target)
        self.offer(plan)
        return plan

    def in_order(self, problem: Problem, orders: Sequence[Order]) -> None:
        """Try complete orders."""
        self.budget -= problem.num_ops
        self.offer(run_in_order(problem, orders))
