"""ZB-V, V-Half and V-Min: two chunks a rank placed in a V, planned from the real costs (arXiv 2405.15362).

The orders of F and B to begin with are those of repeated building blocks and of ranks that run what they prefer; W goes
where it costs least. The best of them are then improved, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from operator import add
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from megatron.zero_bubble.planner.blocks import Block, eager_orders, published_blocks, random_block, repeated
from megatron.zero_bubble.planner.portfolio import (
    IMPROVING,
    Portfolio,
    best_of,
    budget_of,
    fits,
    recomputed_where_needed,
)
from megatron.zero_bubble.planner.preference import Preference
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import EFFORT, PlanRequest, with_room_for_shards
from megatron.zero_bubble.planner.rules import GapRule, Keeping
from megatron.zero_bubble.schedule.costs import SMALLEST, StageCosts
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

NUM_HELD: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {"zb-v": lambda p: p, "v-half": lambda p: p / 2 + 1, "v-min": lambda p: p / 3 + 1}
)
"""Schedule -> how many microbatches each of p ranks holds in the schedule's own memory. With F = B = W, ZB-V then has
no bubble, V-Half about half of 1F1B's, and V-Min about two thirds."""
LEAST_IMPROVING = 25
"""How often all operations are planned while the best plans are improved, however large the schedule is; in proportion
less often with less than the default budget."""
PREFERENCES = (("B0", "F1", "B1", "F0"), ("F1", "B1", "B0", "F0"), ("B1", "F1", "B0", "F0"), ("B1", "B0", "F1", "F0"))
"""Priorities of the ranks of a V."""
LEADS = ((0.85, 0.5), (0.7, 0), (1, 1), (2, 0))
"""How many microbatches rank 0 may run ahead, as a share of what it can hold in chunk 0 alone, and how many fewer each
rank may than the one before it."""
WORTH_VARYING = 0.01
"""The distance from the bound above which blocks are varied."""
NUM_VARIATIONS = 150
"""How many variations of blocks are tried, if the budget allows."""
NUM_RANDOM = 60
"""How many of these are new random blocks."""
NUM_VARIED = 8
"""How many of the best blocks are varied."""
RULE_VARIES = 0.15
"""How often the rule for gaps is varied with the block."""


def in_v(name: str, request: PlanRequest) -> Schedule:
    """The schedule of `NUM_HELD` with this name, in its own memory unless told otherwise."""
    placement, costs = request.placement, request.stage_costs
    limits = request.limits
    if limits is None:
        room = _room_for(NUM_HELD[name](request.num_ranks), placement, costs, request.recompute)
        limits = with_room_for_shards(request, room)
    return recomputed_where_needed(Problem.of(request, limits), partial(best_in_v, name))


def _room_for(num_held: float, placement: Placement, costs: StageCosts, recompute: Recompute) -> tuple[float, ...]:
    """Rank -> the memory of `num_held` microbatches on both of its chunks.

    With full recomputation all but one lack the activations that R restores.
    """
    rooms = []
    for rank in range(placement.num_ranks):
        room = num_held * _whole(placement, costs, rank) + sum(_added(placement, costs, rank))
        if recompute is Recompute.FULL:
            room -= (num_held - 1) * sum(costs.memory_r[stage] for stage in placement.stages_of(rank))
        rooms.append(room)
    return tuple(rooms)


def best_in_v(name: str, problem: Problem) -> Schedule:
    """The best plan within the limits."""
    problem.check_feasible()
    portfolio = _search(problem)
    candidates = portfolio.schedules(name, problem)
    if max(problem.costs.memory_b) > 0 and not problem.recomputes:
        # The planner reserves the memory that B adds from F on, and so fits few microbatches: fusing W may be better.
        together = _back_to_back(name, problem)
        candidates += [] if together is None else [together]
    if problem.recompute is Recompute.FULL:
        inside = problem.recomputing_in_backward()
        if inside.is_feasible:
            apart = with_recomputation(best_in_v(name, inside))
            candidates += [apart] * fits(apart, problem)
    return best_of(candidates, problem) if len(candidates) > 1 else candidates[0]


def _search(problem: Problem) -> Portfolio:
    portfolio = Portfolio(problem, budget_of(problem))
    rules = list(product((GapRule.BALANCED, GapRule.ALWAYS, GapRule.NEVER), Keeping.choices(problem)))
    tried: list[_Tried] = []
    for block in _blocks(problem):
        for rule, keeping in rules:
            if not portfolio.finished:
                orders = eager_orders(problem) if block is None else repeated(problem, block)
                cost = portfolio.fill(problem, orders, rule, keeping=keeping)
                if block is not None:
                    tried.append(_Tried(cost, block, rule, keeping))
    if not problem.recomputes:
        for preference in _preferences(problem):
            if not portfolio.finished:
                portfolio.prefer(problem, preference)
    portfolio.ensure_plan(problem)
    if portfolio.cost > portfolio.bound * (1 + WORTH_VARYING) and not problem.is_long:
        _vary(portfolio, problem, tried)
    if problem.recompute is Recompute.PLANNED:
        portfolio.drop_into_idle_time(problem)
        portfolio.fit(problem, lambda larger: _search(larger).plans)
    if problem.has_shards and problem.budget > 0:
        portfolio.insert_shards(problem, lambda without: _search(without).best)
    if problem.budget > 0:
        least = LEAST_IMPROVING * problem.num_ops * min(1, problem.budget / EFFORT)
        portfolio.improve(problem, int(max(IMPROVING * problem.budget, least)))
    return portfolio


class _Tried(NamedTuple):
    """A block whose orders were tried, with the rules and the cost."""

    cost: float
    block: Block
    rule: GapRule
    keeping: Keeping


def _vary(portfolio: Portfolio, problem: Problem, tried: Sequence[_Tried]) -> None:
    """Try random blocks, and random changes of the best ones."""
    generator, held = Random(problem.num_ops), _num_held(problem)
    best = sorted(tried, key=lambda plan: plan.cost)[:NUM_VARIED]
    for number in range(NUM_VARIATIONS if best else 0):
        if portfolio.finished:
            return
        _, block, rule, keeping = generator.choice(best[: 1 + generator.randrange(len(best))])
        is_new = number < NUM_RANDOM
        block = random_block(problem, held, generator) if is_new else block.varied(generator)
        if is_new or generator.random() < RULE_VARIES:
            rule = generator.choice(list(GapRule))
        cost = portfolio.fill(problem, repeated(problem, block), rule, keeping=keeping)
        if all(cost != plan.cost for plan in best):
            best = sorted([*best, _Tried(cost, block, rule, keeping)], key=lambda plan: plan.cost)[:NUM_VARIED]


def _preferences(problem: Problem) -> Iterator[Preference]:
    most = 2 * _num_held(problem)
    for share, slope in LEADS:
        leads = tuple(max(1, round(most * share - slope * rank)) for rank in range(problem.num_ranks))
        for kinds in PREFERENCES:
            yield Preference(kinds, leads)


def _back_to_back(name: str, problem: Problem) -> Schedule | None:
    """The best plan in which every W follows its B, as if they were one operation; None if none fits."""
    costs, placement = problem.costs, problem.placement
    fused = replace(
        costs,
        time_b=tuple(map(add, costs.time_b, costs.time_w)),
        time_w=tuple(max(SMALLEST, 1e-6 * w) for w in costs.time_w),
        memory_b=tuple(map(add, costs.memory_b, costs.memory_w)),
        memory_w=(0,) * placement.num_stages,
    )
    limits = tuple(limit - max(_added(placement, costs, rank)) for rank, limit in enumerate(problem.limits))
    room = replace(problem, costs=fused, limits=limits)
    if not room.is_feasible:
        return None
    schedule = room.schedule(name, _search(room).best.orders)
    without_w = ([op for op in lane if op.kind is not OpKind.W] for lane in schedule.ops)
    return replace(schedule, ops=tuple(tuple(chain.from_iterable(map(_and_its_w, lane))) for lane in without_w))


def _and_its_w(op: Op) -> tuple[Op, ...]:
    return (op, op._replace(kind=OpKind.W)) if op.kind is OpKind.B else (op,)


def _whole(placement: Placement, costs: StageCosts, rank: int) -> float:
    """M_B of a rank: the memory of one microbatch on both of its chunks."""
    return sum(costs.memory_f[stage] for stage in placement.stages_of(rank))


def _added(placement: Placement, costs: StageCosts, rank: int) -> list[float]:
    """Chunk -> memory that B adds: with activation recomputation a microbatch holds more after its B than before it."""
    return [max(0, costs.memory_b[stage]) for stage in placement.stages_of(rank)]


def _num_held(problem: Problem) -> float:
    """How many microbatches every rank can hold on both of its chunks, if all are dropped that can be."""
    fitting: list[float] = []
    for rank, limit in enumerate(problem.limits):
        each, once = _whole(problem.placement, problem.costs, rank), 0.0
        if problem.recomputes:
            footprints = [problem.footprints[stage] for stage in problem.stages_of[rank]]
            each, once = (
                sum(footprint.dropped for footprint in footprints),
                max(footprint.restored for footprint in footprints),
            )
        if each > 0:
            fitting.append((limit - once) / each)
    return min(fitting, default=problem.num_ranks)


def _blocks(problem: Problem) -> Iterator[Block | None]:
    """Blocks to repeat, the most promising first; None stands for ZB-V's order."""
    p, held = problem.num_ranks, _num_held(problem)
    if held >= p:
        yield None
    yield from published_blocks(problem, held)
    if held < p:
        yield None
