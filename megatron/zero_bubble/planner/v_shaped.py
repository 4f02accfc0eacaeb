"""Plans schedules for two chunks per rank, placed in a V, such as ZB-V, V-Half and V-Min (arXiv 2405.15362).

The candidates are orders of F and B from repeated building blocks and from list scheduling, with W inserted in idle
time. At the end of planning, a local search improves the best plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from operator import add, sub
from random import Random
from typing import NamedTuple

from megatron.zero_bubble.planner.blocks import Block, eager_orders, published_blocks, random_block, repeated
from megatron.zero_bubble.planner.fill import InOrder
from megatron.zero_bubble.planner.orders import schedule_of_orders
from megatron.zero_bubble.planner.portfolio import Portfolio, best_of, fits, is_draft
from megatron.zero_bubble.planner.preference import ByPriority
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import EFFORT
from megatron.zero_bubble.planner.rules import GapRule, Keeping
from megatron.zero_bubble.schedule.costs import SMALLEST
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

LEAST_IMPROVING = 50
"""Least budget of the local search per operation of the schedule, if the problem has a budget of at least `EFFORT`. If
the budget of the problem is smaller, the least budget is smaller in the same proportion."""
PRIORITIES = (("B0", "F1", "B1", "F0"), ("F1", "B1", "B0", "F0"), ("B1", "F1", "B0", "F0"), ("B1", "B0", "F1", "F0"))
"""Priorities of F and B to try in list scheduling; in one plan all ranks have the same priorities."""
LEADS = ((0.85, 0.5), (0.7, 0), (1, 1), (2, 0))
"""Pairs (share, decrease) for limits on the number of microbatches in flight in chunk 0. The limit of rank 0 is `share`
times the number that would fit in memory without chunk 1. The limit falls by `decrease` from each rank to the next."""
NUM_SPARSE = 4
"""Number of building blocks to try for each number of microbatches in flight (see `_sparse_blocks`)."""
WORTH_VARYING = 0.01
"""Building blocks are varied if the cost of the best plan exceeds the lower bound by more than this fraction."""
NUM_VARIATIONS = 150
"""Largest number of random and varied building blocks that a search tries."""
NUM_RANDOM = 60
"""Number of random building blocks that a search tries before it varies the best building blocks."""
NUM_VARIED = 8
"""Number of building blocks that the search varies: the best blocks so far."""
RULE_VARIES = 0.15
"""Probability that a varied building block is tried with a random `GapRule` instead of its own `GapRule`."""


def best_in_v(problem: Problem) -> Schedule:
    """Plan a schedule for a V-shaped placement within the memory limits.

    Raises:
        Infeasible: no schedule fits in the memory limits.
    """
    beside_b: list[Schedule] = []
    if problem.recompute is Recompute.FULL and (inside := problem.recomputing_in_backward()).is_feasible:
        beside_b = [with_recomputation(best_in_v(inside))]  # each R directly precedes its B
        beside_b *= fits(beside_b[0], problem)
    if not beside_b:
        problem.check_feasible()
    candidates = _search(problem).schedules if problem.is_feasible else []
    if max(problem.costs.memory_b) > 0 and not problem.recomputes:
        # When F starts, the planner already reserves the memory that B adds, so that few microbatches fit. If W
        # follows B at once, B and W together add less memory.
        back_to_back = _back_to_back(problem)
        candidates += [] if back_to_back is None else [back_to_back]
    return best_of(candidates + beside_b, problem)


def _search(problem: Problem) -> Portfolio:
    """Plan schedules for a V-shaped placement, and return the best plans.

    If the budget is spent before a plan fits in memory, the search still tries each remaining building block, with only
    one `GapRule` per block, and then list scheduling. The order that runs one microbatch at a time always fits in
    memory, but can take several times as long as other orders.
    """
    portfolio = Portfolio(problem)
    rules = list(product((GapRule.BALANCED, GapRule.ALWAYS, GapRule.NEVER), Keeping.choices(problem)))
    tried: list[_Tried] = []
    for block in _blocks(problem):
        for number, (rule, keeping) in enumerate(rules):
            if not portfolio.finished or (not portfolio.plans and number == 0):
                orders = eager_orders(problem) if block is None else repeated(problem, block)
                cost = portfolio.run(InOrder(problem, orders, rule, keeping))
                if block is not None:
                    tried.append(_Tried(cost, block, rule, keeping))
    if not problem.recomputes:
        for in_flight_limits, priorities in product(_in_flight_limits(problem), PRIORITIES):
            if not portfolio.finished or not portfolio.plans:
                portfolio.run(ByPriority(problem, priorities, in_flight_limits))
        if not problem.is_long and not is_draft(problem):
            for block, rule in product(_sparse_blocks(problem), GapRule):
                if portfolio.cost > portfolio.aim:
                    portfolio.run(InOrder(problem, repeated(problem, block), rule))
    portfolio.ensure_plan()
    if portfolio.cost > problem.bound * (1 + WORTH_VARYING) and not problem.is_long:
        _vary(portfolio, tried)
    if problem.recompute is Recompute.PLANNED:
        portfolio.drop_into_idle_time()
        portfolio.fit(_search)
    portfolio.insert_shards(_search)
    if problem.budget > 0:
        least = LEAST_IMPROVING * problem.num_ops * min(1, problem.budget / EFFORT)
        portfolio.improve(int(max(problem.budget, least)))
    return portfolio


class _Tried(NamedTuple):
    """A building block that was tried, the rules with which it was tried, and the cost of the resulting plan."""

    cost: float
    block: Block
    rule: GapRule
    keeping: Keeping


def _vary(portfolio: Portfolio, tried: Sequence[_Tried]) -> None:
    """Try random building blocks, and random changes of the best building blocks."""
    problem = portfolio.problem
    generator, in_flight = Random(problem.num_ops), _max_in_flight(problem)
    best = sorted(tried, key=lambda plan: plan.cost)[:NUM_VARIED]
    for number in range(NUM_VARIATIONS if best else 0):
        if portfolio.finished:
            return
        _, block, rule, keeping = generator.choice(best[: 1 + generator.randrange(len(best))])
        is_new = number < NUM_RANDOM
        block = random_block(problem, in_flight, generator) if is_new else block.varied(generator)
        if is_new or generator.random() < RULE_VARIES:
            rule = generator.choice(list(GapRule))
        cost = portfolio.run(InOrder(problem, repeated(problem, block), rule, keeping))
        if all(cost != plan.cost for plan in best):
            best = sorted([*best, _Tried(cost, block, rule, keeping)], key=lambda plan: plan.cost)[:NUM_VARIED]


def _in_flight_limits(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield tuples: rank -> largest number of microbatches in flight in chunk 0 of the rank."""
    most = 2 * _max_in_flight(problem)
    for share, slope in LEADS:
        yield tuple(max(1, round(most * share - slope * rank)) for rank in range(problem.num_ranks))


def _back_to_back(problem: Problem) -> Schedule | None:
    """The best plan in which every W follows its B at once; None if no such plan fits in memory."""
    costs = problem.costs
    fused = replace(
        costs,
        time_b=tuple(costs.times[OpKind.BW]),
        time_w=tuple(max(SMALLEST, 1e-6 * w) for w in costs.time_w),
        memory_b=tuple(map(add, costs.memory_b, costs.memory_w)),
        memory_w=(0,) * problem.num_stages,
        saved_bw=(),
    )
    added = (max(0, *map(costs.memory_b.__getitem__, stages)) for stages in problem.stages_of)
    limits = tuple(map(sub, problem.limits, added))
    with_fused = replace(problem, costs=fused, limits=limits)
    if not with_fused.is_feasible:
        return None
    schedule = schedule_of_orders(with_fused, _search(with_fused).best.orders)
    kinds = {OpKind.B: (OpKind.B, OpKind.W), OpKind.W: ()}
    return schedule.with_kinds(lambda _, op: kinds.get(op.kind, (op.kind,)))


def _max_in_flight(problem: Problem) -> float:
    """The largest number of microbatches in flight on both chunks that fits in the memory of every rank.

    In a problem with recomputation, every microbatch in flight is assumed to drop its activations.
    """
    memory, room = problem.placement.sums(problem.costs.memory_f), list(problem.limits)
    if problem.recomputes:
        memory = problem.placement.sums([footprint.dropped for footprint in problem.footprints])
        for rank, stages in enumerate(problem.stages_of):
            room[rank] -= max(problem.footprints[stage].restored for stage in stages)
    fitting = (limit / amount for limit, amount in zip(room, memory, strict=True) if amount > 0)
    return min(fitting, default=problem.num_ranks)


def _blocks(problem: Problem) -> list[Block | None]:
    """The building blocks to repeat, the most promising first; None stands for the order of ZB-V."""
    in_flight = _max_in_flight(problem)
    blocks = list(published_blocks(problem, in_flight))
    return [None, *blocks] if in_flight >= problem.num_ranks else [*blocks, None]


def _sparse_blocks(problem: Problem) -> Iterator[Block]:
    """Yield building blocks with fewer microbatches in flight than fit in memory, so that W can be delayed."""
    p, most = problem.num_ranks, _max_in_flight(problem)
    for in_flight in (p, p / 2 + 1, p / 3 + 1):
        if in_flight < most:
            yield from islice(published_blocks(problem, in_flight), NUM_SPARSE)
