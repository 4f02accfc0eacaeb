"""Chooses between candidates: plans, within a budget, and whole schedules, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import inf

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.critical_paths import run_in_order
from megatron.zero_bubble.planner.event_loop import EventLoop, PlannedOrders
from megatron.zero_bubble.planner.expected_time import slowdown
from megatron.zero_bubble.planner.fill import InOrder
from megatron.zero_bubble.planner.fitting import dropped_to_fit
from megatron.zero_bubble.planner.local_search import improve
from megatron.zero_bubble.planner.problem import Problem, tolerance
from megatron.zero_bubble.planner.rules import GapRule, Keeping
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute, num_recomputed
from megatron.zero_bubble.schedule.shard_ops import delays, with_best_delay, with_vocabulary
from megatron.zero_bubble.schedule.simulate import simulate

NUM_PLANS = 3
"""How many of the best plans are kept to be improved."""
PARTS = 2
"""Number of parts of the budget where recomputation is planned."""
LEAST_CANDIDATES = 12
"""Candidates to try however large the schedule is."""
QUICK_CANDIDATES = 5
"""The same where there is no budget."""
INSERTED = 8
"""The part of a budget with which a plan without shards is made, into whose order they are inserted."""
LARGER_LIMITS = (1.1, 1.4, 1.7)
"""How much more memory a plan takes that keeps everything, of which something is then dropped to make it fit."""
IMPROVING = 0.5
"""Operations to plan while the best plans are improved, where those of all candidates together are 1."""


def budget_of(problem: Problem) -> int:
    """The budget for all candidates: at least for `LEAST_CANDIDATES`, or for fewer if the problem is long or quick."""
    if problem.is_long:
        return max(problem.budget // 2, LEAST_CANDIDATES * problem.num_ops // 4)
    return max(problem.budget, (LEAST_CANDIDATES if problem.budget > 0 else QUICK_CANDIDATES) * problem.num_ops)


class Portfolio:
    """The best plan so far of a search that stops at the problem's aim, or when its budget is spent.

    The budget counts operations planned, and not seconds, so that every rank of a job finds the same schedule.
    """

    def __init__(self, problem: Problem, budget: int) -> None:
        self.bound, self.aim = problem.bound, problem.aim
        self.budget = budget
        self.plans: list[PlannedOrders] = []
        """The best plans so far, from the best on, no two of the same cost."""

    @property
    def best(self) -> PlannedOrders:
        """The best plan so far. There is one after `ensure_plan`."""
        assert self.plans, "no plan fits"
        return self.plans[0]

    @property
    def cost(self) -> float:
        """The cost of the best plan; infinity before there is one."""
        return self.plans[0].cost if self.plans else inf

    @property
    def finished(self) -> bool:
        """Whether the aim is reached or the budget spent."""
        return self.budget <= 0 or self.cost <= self.aim

    def schedules(self, problem: Problem) -> list[Schedule]:
        """The best plan as a schedule, or all plans that are kept if their expected times decide."""
        return [problem.schedule(plan.orders) for plan in self.plans[: None if problem.varies else 1]]

    def offer(self, plan: PlannedOrders | None) -> None:
        """Keep `plan` if it is among the best so far; of equals the first stays."""
        if plan is None or any(abs(plan.cost - other.cost) <= tolerance(other.cost) for other in self.plans):
            return
        self.plans = sorted([*self.plans, plan], key=lambda each: each.cost)[:NUM_PLANS]

    def improve(self, problem: Problem, budget: int, *, keeps_forwards: bool = False) -> None:
        """Improve the best plans in turn, with equal parts of `budget`, until one reaches the aim.

        Plans of a long problem stay as they are. `keeps_forwards` keeps the order in which a rank runs the forwards of
        its chunks.
        """
        for number, plan in enumerate(list(self.plans)):
            if budget > 0 and self.cost > self.aim and not problem.is_long:
                share = budget // (NUM_PLANS - number)
                better, left = improve(problem, plan, share, keeps_forwards=keeps_forwards)
                budget -= share - left
                self.plans.remove(plan)
                self.offer(better)

    def run(self, loop: EventLoop) -> float:
        """Offer the plan of a policy; its cost, infinity if the ranks deadlock."""
        plan = loop.run()
        self.budget -= loop.weight * loop.problem.num_ops
        self.offer(plan)
        return plan.cost if plan is not None else inf

    def in_order(self, problem: Problem, orders: Sequence[Order]) -> None:
        """Offer complete orders."""
        self.budget -= problem.num_ops
        self.offer(run_in_order(problem, orders))

    def ensure_plan(self, problem: Problem) -> None:
        """Run one microbatch after the other, which works within all feasible limits, if there is no other plan."""
        if not self.plans:
            self.in_order(problem, problem.one_by_one())

    def insert_shards(self, problem: Problem, search: Callable[[Problem], PlannedOrders]) -> None:
        """Try the plans of `search` for a whole vocabulary, with the operations on shards inserted into their order.

        The delay of the backwards that they cause takes one more microbatch in flight.
        """
        without = replace(problem.without_shards(), budget=problem.budget // INSERTED)
        for limits in (without.limits, problem.limits):
            whole = replace(without, limits=limits)
            if whole.is_feasible and not self.finished:
                schedule = whole.schedule(search(whole).orders)
                for delay in delays(schedule, problem.costs):
                    [inserted] = with_vocabulary(schedule, problem.costs, [delay])
                    self.in_order(problem, problem.orders(inserted))

    def fit(self, problem: Problem, search: Callable[[Problem], Sequence[PlannedOrders]]) -> None:
        """Try the plans of `search` that keep everything in more memory, with as many activations dropped as fit."""
        for factor in LARGER_LIMITS if problem.budget > 0 else LARGER_LIMITS[1:2]:
            limits = tuple(factor * limit for limit in problem.limits)
            larger = replace(problem.keeping_everything(), limits=limits, budget=problem.budget // 4)
            if larger.is_feasible:
                for plan in search(larger):
                    orders = dropped_to_fit(problem, plan)
                    if orders is not None:
                        self.in_order(problem, orders)

    def drop_into_idle_time(self, problem: Problem) -> None:
        """Drop, in the best plan, the activations that R can restore while a rank idles, so that others are kept."""
        drops: frozenset[tuple[int, int]] = frozenset()
        while self.plans and not self.finished:
            before = self.cost
            more_drops = drops | _restored_for_nothing(problem, self.best)
            orders = problem.codes.f_and_b(self.best.orders)
            for rule, defers in product((GapRule.BALANCED, GapRule.ALWAYS), (False, True)):
                self.run(InOrder(problem, orders, rule, Keeping(defers, more_drops)))
            if more_drops == drops or self.cost >= before * (1 - 1e-9):
                return
            drops = more_drops


def _restored_for_nothing(problem: Problem, plan: PlannedOrders) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) of everything that is kept though its rank idles long enough before its B for an R."""
    schedule = problem.schedule(plan.orders)
    timeline = simulate(schedule, problem.costs, overlap_communication=problem.overlap_communication)
    idle = set()
    for rank, lane in enumerate(timeline.lanes):
        for before, timed in pairwise(lane):
            stage = problem.placement.stage_of(rank, timed.op.chunk)
            is_kept = timed.op._replace(kind=OpKind.R) not in schedule.op_sets[rank]
            gap = timed.start - before.end
            if timed.op.kind is OpKind.B and is_kept and gap > 0 and gap >= problem.costs.time_r[stage]:
                idle.add((stage, timed.op.microbatch))
    return frozenset(idle)


def recomputed_where_needed(problem: Problem, best: Callable[[Problem], Schedule]) -> Schedule:
    """The schedule that `best` makes for the problem; where the planner chooses what to recompute, with the fewest R.

    The planner then keeps everything, drops everything, or chooses microbatch by microbatch, and takes the shortest of
    these schedules; of equals the one with the fewest R. A schedule that keeps everything is taken if more memory would
    not make it shorter. Without effort the planner keeps everything, or chooses.

    Raises:
        Infeasible: nothing fits.
    """
    if problem.recompute is not Recompute.PLANNED:
        return best(problem)
    is_quick, full = problem.budget == 0, replace(problem, recompute=Recompute.FULL)
    problem = replace(problem, budget=problem.budget // PARTS)
    keeping = problem.keeping_everything()
    candidates, costs = [], []
    if keeping.is_feasible:
        candidates.append(best(keeping))
        costs.append(_cost(candidates[0], problem))
        if not is_quick and not _lacks_memory(keeping, costs[0] * (1 - 1e-9), best):
            return candidates[0]
    problem.check_feasible()
    for every in (problem, full)[: 1 if is_quick else 2]:
        if not costs or every.bound_if_fused < min(costs):
            candidates.append(best(every))
            costs.append(_cost(candidates[-1], problem))
    longest = min(costs) + tolerance(min(costs))
    equals = [schedule for schedule, cost in zip(candidates, costs, strict=True) if cost <= longest]
    return min(equals, key=num_recomputed)


def _lacks_memory(keeping: Problem, cost: float, best: Callable[[Problem], Schedule]) -> bool:
    """Whether more memory would make a plan without R shorter than `cost`."""
    held = keeping.placement.sums([footprint.whole for footprint in keeping.footprints])
    everything = tuple(map(max, keeping.limits, (keeping.num_microbatches * whole for whole in held)))
    unlimited = replace(keeping, limits=everything, budget=0 if keeping.is_long else keeping.budget)
    return keeping.limits != everything and cost > unlimited.aim and cost > _cost(best(unlimited), unlimited)


def _cost(schedule: Schedule, problem: Problem) -> float:
    return judged(schedule, problem)[0]


def judged(schedule: Schedule, problem: Problem) -> tuple[float, float]:
    """Return the time by which a schedule is judged, and a second time that decides between equal schedules."""
    timeline = simulate(schedule, problem.costs, overlap_communication=problem.overlap_communication)
    factor = slowdown(timeline, problem.spread, problem.time_between)
    return problem.judged(factor * timeline.cost, factor * timeline.makespan)


def fits(schedule: Schedule, problem: Problem) -> bool:
    """Whether no rank needs more memory than the problem's limits."""
    peaks = peak_memory(schedule, problem.costs)
    return all(peak <= limit + tolerance(limit) for peak, limit in zip(peaks, problem.limits, strict=True))


def with_shards(schedules: Iterable[Schedule], problem: Problem, shortest: float) -> Iterator[Schedule]:
    """The schedules with operations on vocabulary shards inserted.

    Of a long problem those are left out that exceed the limits, or take longer than `shortest`, even with the whole
    vocabulary in their W: operations on shards add waits and microbatches in flight.
    """
    whole = replace(problem, costs=problem.costs.with_vocabulary_in_weight_gradients(), spread=0.0, time_between=0.0)
    for schedule in schedules:
        if not problem.is_long or (fits(schedule, whole) and judged(schedule, whole)[0] <= shortest):
            yield with_best_delay(schedule, problem.costs, problem.limits)


def best_of(schedules: Iterable[Schedule], problem: Problem) -> Schedule:
    """The schedule that takes the shortest time by which the problem judges; of equals by the other, or the first."""
    schedules = list(schedules)
    if len(schedules) == 1:
        return schedules[0]
    times = [(*judged(schedule, problem), schedule) for schedule in schedules]
    shortest = min(cost for cost, _, _ in times)
    equals = [(tie, schedule) for cost, tie, schedule in times if cost <= shortest + tolerance(shortest)]
    return min(equals, key=lambda equal: equal[0])[1]
