"""Keeps the best plans of a search with a budget of planned operations; chooses the best schedules by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from operator import sub

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.critical_paths import run_in_order
from megatron.zero_bubble.planner.event_loop import EventLoop, PlannedOrders
from megatron.zero_bubble.planner.expected_time import slowdown
from megatron.zero_bubble.planner.fill import InOrder
from megatron.zero_bubble.planner.fitting import dropped_to_fit
from megatron.zero_bubble.planner.local_search import RESTARTS, improve, move_cost
from megatron.zero_bubble.planner.orders import one_by_one, orders_of_schedule, schedule_of_orders
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import are_within, tolerance
from megatron.zero_bubble.planner.rules import GapRule, Keeping
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.shard_ops import delays, with_best_delay, with_vocabulary

NUM_PLANS = 3
"""Number of plans, the best first, on which the local search spends at least half of its budget."""
MOST_PLANS = 25
"""Largest number of kept plans: a large number, because local searches from a few plans often end in the same plan."""
FEW_MOVES = 40
"""Least number of moves that the local search tries on each of several plans, if the budget allows."""
FEW_RESTARTS = 2
"""Largest number of restarts in a row without a better plan, in the local search on each kept plan."""
LEAST_CANDIDATES = 12
"""Smallest number of candidate orders that a budget allows, for a problem of any size."""
QUICK_CANDIDATES = 5
"""Number of candidate orders that are tried if the budget of planned operations is zero."""
INSERTED = 8
"""The search for plans into which shard operations are inserted gets the budget divided by this number."""
FAR_WITH_SHARDS = 1.05
"""Operations on shards are not inserted into schedules that take more than `FAR_WITH_SHARDS` times the best time."""
FAR = 1.25
"""A candidate that takes more than `FAR` times the best time may be left unfinished. After such a candidate, the search
stops in its direction, such as larger groups."""
LARGER_LIMITS = (1.1, 1.4, 1.7)
"""Factors by which the memory limit is raised for plans without recomputation, before activations are dropped."""


def _budget_of(problem: Problem) -> int:
    """Budget of a search, as a number of planned operations; a long problem gets only a quarter."""
    if problem.is_long:
        return max(problem.budget // 4, LEAST_CANDIDATES * problem.num_ops // 4)
    return max(problem.budget, (LEAST_CANDIDATES if problem.budget > 0 else QUICK_CANDIDATES) * problem.num_ops)


def is_draft(problem: Problem) -> bool:
    """Whether the budget of the problem is too small for `LEAST_CANDIDATES` candidate orders."""
    return problem.budget < LEAST_CANDIDATES * problem.num_ops


class Portfolio:
    """The best plans of a search; the search ends when a plan reaches the target cost or the budget is spent.

    The budget counts planned operations, not seconds, so that every rank of a job computes the same schedule.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.aim = problem, problem.aim
        self.budget = _budget_of(problem)
        self.plans: list[PlannedOrders] = []
        """The best plans so far, the best first; no two plans have the same cost."""

    @property
    def best(self) -> PlannedOrders:
        """The best plan so far; call `ensure_plan` first, so that a plan exists."""
        assert self.plans, "no plan fits"
        return self.plans[0]

    @property
    def cost(self) -> float:
        """The cost of the best plan; infinity before the first plan."""
        return self.plans[0].cost if self.plans else inf

    @property
    def finished(self) -> bool:
        """Whether a plan reaches the target cost, or the budget is spent."""
        return self.budget <= 0 or self.cost <= self.aim

    @property
    def schedules(self) -> list[Schedule]:
        """The schedule of the best plan; if durations vary, the schedules of the best `NUM_PLANS` plans."""
        best = self.plans[: NUM_PLANS if self.problem.varies else 1]
        return [schedule_of_orders(self.problem, plan.orders) for plan in best]

    @property
    def _longest(self) -> float:
        """The cost above which a candidate need not be planned to its end, because better plans are kept already."""
        num_needed = 1 if self.problem.budget == 0 else NUM_PLANS if is_draft(self.problem) else MOST_PLANS
        return max(self.plans[num_needed - 1].cost, FAR * self.cost) if len(self.plans) >= num_needed else inf

    def offer(self, plan: PlannedOrders | None) -> None:
        """Keep `plan` if it is one of the best plans so far and no kept plan has the same cost."""
        if plan is None or any(abs(plan.cost - other.cost) <= tolerance(other.cost) for other in self.plans):
            return
        self.plans = sorted([*self.plans, plan], key=lambda each: each.cost)[:MOST_PLANS]

    def improve(self, budget: int) -> None:
        """Improve plans by local search, first many plans briefly, then the best, until a plan reaches the target cost.

        If the budget is small, fewer plans are improved, so that the search can try `FEW_MOVES` moves on each of them.
        Plans of a long problem (see `Problem.is_long`) are not improved.

        Args:
            budget: effort of the local search, as a number of planned operations.
        """
        if self.problem.is_long:
            return
        few_moves, half = FEW_MOVES * move_cost(self.problem), budget // 2
        num_all = min(len(self.plans), half // few_moves)
        if num_all > NUM_PLANS:
            budget += self._improve_best(num_all, half, FEW_RESTARTS) - half
        self._improve_best(min(NUM_PLANS, max(1, budget // few_moves)), budget, RESTARTS)

    def _improve_best(self, num_plans: int, budget: int, restarts: int) -> int:
        """Improve the best plans with equal parts of the budget; return the unspent budget."""
        plans = self.plans[:num_plans]
        for number, plan in enumerate(plans):
            if budget > 0 and self.cost > self.aim:
                share = budget // (len(plans) - number)
                better, left = improve(self.problem, plan, share, restarts=restarts)
                budget -= share - left
                self.plans.remove(plan)
                self.offer(better)
        return budget

    def run(self, loop: EventLoop) -> float:
        """Run a scheduling policy, keep its plan if the plan is among the best, and return the cost of the plan.

        The cost is infinite if the ranks deadlock, or if the plan is left unfinished because its cost is high.
        """
        plan = loop.run(self._longest)
        self.budget -= loop.weight * loop.problem.num_ops
        self.offer(plan)
        return plan.cost if plan is not None else inf

    def run_all(self, policies: Iterator[EventLoop]) -> None:
        """Run scheduling policies, one after another, until the search ends."""
        while not self.finished and (policy := next(policies, None)) is not None:
            self.run(policy)

    def in_order(self, orders: Sequence[Order]) -> None:
        """Keep complete orders as a plan if they fit in memory, do not deadlock, and are among the best plans."""
        self.budget -= self.problem.num_ops
        self.offer(run_in_order(self.problem, orders))

    def ensure_plan(self) -> None:
        """If there is no plan, keep the plan that runs one microbatch at a time; it fits in memory if any plan fits."""
        if not self.plans:
            self.in_order(one_by_one(self.problem))

    def insert_shards(self, search: Callable[[Problem], Portfolio]) -> None:
        """Plan without vocabulary shards by calling `search`, insert operations on shards, and keep the best plans.

        The method does nothing if the problem has no vocabulary shards or if its budget is zero. Operations on
        vocabulary shards delay the backwards, so that one more microbatch is in flight.
        """
        problem = self.problem
        if not problem.has_shards or problem.budget == 0:
            return
        costs = problem.costs.with_vocabulary_in_weight_gradients()
        lower = tuple(map(sub, problem.limits, problem.whole_memory))
        for limits in (lower, problem.limits):
            whole = replace(problem, costs=costs, limits=limits, budget=problem.budget // INSERTED)
            if whole.is_feasible and not self.finished:
                for plan in search(whole).plans[:1]:
                    schedule = schedule_of_orders(whole, plan.orders)
                    for inserted in with_vocabulary(
                        schedule,
                        problem.costs,
                        delays(schedule, problem.costs),
                        overlap_communication=problem.overlap_communication,
                    ):
                        self.in_order(orders_of_schedule(problem, inserted))

    def fit(self, search: Callable[[Problem], Portfolio]) -> None:
        """Plan without R under raised memory limits, drop the activations that do not fit, and keep the best plans."""
        problem = self.problem
        for factor in LARGER_LIMITS[1:2] if is_draft(problem) else LARGER_LIMITS:
            limits = tuple(factor * limit for limit in problem.limits)
            larger = replace(problem.keeping_everything(), limits=limits, budget=problem.budget // 4)
            if larger.is_feasible:
                for plan in search(larger).plans:
                    orders = dropped_to_fit(problem, plan)
                    if orders is not None:
                        self.in_order(orders)

    def drop_into_idle_time(self) -> None:
        """Drop activations that can be recomputed in idle time of the best plan, so that other activations fit."""
        problem, drops = self.problem, frozenset[tuple[int, int]]()
        while self.plans and not self.finished:
            before = self.cost
            more_drops = drops | _recomputable_in_idle_time(problem, self.best)
            orders = problem.codes.f_and_b(self.best.orders)
            for rule, defers in product((GapRule.BALANCED, GapRule.ALWAYS), (False, True)):
                self.run(InOrder(problem, orders, rule, Keeping(defers, more_drops)))
            if more_drops == drops or self.cost >= before * (1 - 1e-9):
                return
            drops = more_drops


def _recomputable_in_idle_time(problem: Problem, plan: PlannedOrders) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of all kept activations whose R would fit in the idle time before their B."""
    schedule = schedule_of_orders(problem, plan.orders)
    idle = set()
    for rank, lane in enumerate(problem.simulated(schedule).lanes):
        for before, timed in pairwise(lane):
            stage = problem.placement.stage_of(rank, timed.op.chunk)
            is_kept = timed.op._replace(kind=OpKind.R) not in schedule.op_sets[rank]
            gap = timed.start - before.end
            if timed.op.kind is OpKind.B and is_kept and gap > 0 and gap >= problem.costs.time_r[stage]:
                idle.add((stage, timed.op.microbatch))
    return frozenset(idle)


def cost_of(schedule: Schedule, problem: Problem) -> float:
    """Simulate a schedule; return the time by which the planner compares schedules."""
    return judged(schedule, problem)[0]


def judged(schedule: Schedule, problem: Problem) -> tuple[float, float]:
    """Simulate a schedule; return the time by which schedules are compared, and the time that decides ties."""
    timeline = problem.simulated(schedule)
    factor = slowdown(timeline, problem.spread, problem.time_between)
    return problem.judged(factor * timeline.cost, factor * timeline.makespan)


def fits(schedule: Schedule, problem: Problem) -> bool:
    """Whether the peak memory of every rank is within the memory limits of the problem."""
    return are_within(peak_memory(schedule, problem.costs), problem.limits)


def with_shards(schedules: Iterable[Schedule], problem: Problem, shortest: float) -> Iterator[Schedule]:
    """Yield schedules with operations on vocabulary shards inserted.

    A schedule is first simulated with the time of operations on shards added to the time of W. If the simulated
    schedule exceeds the memory limits or takes more than `FAR_WITH_SHARDS` times as long as `shortest` (in a long
    problem, longer than `shortest`), the schedule is left out, because inserting operations on shards usually adds idle
    time and microbatches in flight. No schedule is left out if `shortest` is infinite, that is, if no plan exists.
    """
    whole = replace(problem, costs=problem.costs.with_vocabulary_in_weight_gradients(), spread=0.0, time_between=0.0)
    longest = shortest * (1 if problem.is_long else FAR_WITH_SHARDS)
    for schedule in schedules:
        if longest == inf or (fits(schedule, whole) and cost_of(schedule, whole) <= longest):
            yield with_best_delay(
                schedule,
                problem.costs,
                problem.limits,
                overlap_communication=problem.overlap_communication,
                takes_makespan=problem.takes_makespan,
            )


def best_of(schedules: Iterable[Schedule], problem: Problem) -> Schedule:
    """The fastest schedule by the measure that the problem asks for: the longest span of a rank, or the makespan.

    The makespan decides between equal longest spans, and the longest span decides between equal makespans.
    """
    schedules = list(schedules)
    if len(schedules) == 1:
        return schedules[0]
    times = [(*judged(schedule, problem), schedule) for schedule in schedules]
    shortest = min(cost for cost, _, _ in times)
    equals = [(tie, schedule) for cost, tie, schedule in times if cost <= shortest + tolerance(shortest)]
    return min(equals, key=lambda equal: equal[0])[1]
