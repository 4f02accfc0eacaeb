"""Plans one chunk a rank, or several that are interleaved, from their costs and at any memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from math import inf
from statistics import median

from megatron.zero_bubble.planner.fill import InOrder
from megatron.zero_bubble.planner.grouped import InGroups, alternating_orders, even_groups
from megatron.zero_bubble.planner.portfolio import IMPROVING, Portfolio, best_of, budget_of, fits, with_shards
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.rules import GapRule, Keeping
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.generators.gpipe import gpipe
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b, interleaved_zb
from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.generators.zb_h1 import zb_h1
from megatron.zero_bubble.schedule.generators.zb_h2 import zb_h2
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

SIMPLE = (one_f_one_b, zb_h1, zb_h2, gpipe)
"""The schedules of one chunk a rank that need no costs."""
ALL_RULES = (GapRule.BALANCED, GapRule.ALWAYS, GapRule.NEVER)
"""Rules for gaps that are too short for a W, the most promising first."""
RULES = (
    (GapRule.BALANCED, GapRule.ALWAYS),
    (GapRule.BALANCED, GapRule.BALANCED),
    (GapRule.NEVER, GapRule.BALANCED),
    (GapRule.NEVER, GapRule.NEVER),
)
"""Rules for gaps that are too short for a W, and for an F."""

CHOICES_WITHOUT_PLAN = 5
"""Sizes of groups that are tried until a plan fits, however large the schedule is."""

Groups = tuple[int, ...]
"""The sizes of the groups in which microbatches pass through the chunks."""


def best_in_groups(problem: Problem, group_size: int | None) -> Schedule:
    """The best of the plan and of the named schedules of the placement that fit.

    The planner knows B and W as two operations, and reserves the memory that B adds from F on, or from R on. Where a
    rank ends with a gradient that it sends, or B adds memory, a schedule that fuses them may be better.
    Where iterations do not interlock, the best one has the shortest makespan, and not the shortest span.
    With a `group_size` the forwards of every rank are in the order of such groups, if that fits; otherwise the sizes of
    groups are planned, too.
    """
    candidates = [] if group_size is None else _candidates(problem, group_size)
    candidates = candidates or _candidates(problem, None)
    if not candidates:
        problem.check_feasible()
    return best_of(candidates, problem)


def _candidates(problem: Problem, group_size: int | None) -> list[Schedule]:
    """The plan and the named schedules, as far as they fit; `group_size` as in `best_in_groups`."""
    candidates, shortest = [], inf
    if problem.is_feasible:
        portfolio = plan_chunks(problem, group_size)
        candidates, shortest = portfolio.schedules(problem), portfolio.cost
        is_best = not problem.varies and portfolio.cost <= problem.bound_if_fused * (1 + 1e-9)
        if candidates and (problem.leaves_out_named or is_best):
            return candidates
    others = list(_named(problem, group_size))
    if problem.recompute is Recompute.FULL:
        others = [with_recomputation(schedule) for schedule in others]
    if problem.has_shards:
        others = list(with_shards(others, problem, shortest))
    if problem.recompute is Recompute.FULL:
        others += map(with_recomputation, _candidates(problem.recomputing_in_backward(), group_size))
    return candidates + [schedule for schedule in others if fits(schedule, problem)]


def _named(problem: Problem, group_size: int | None) -> Iterator[Schedule]:
    """The schedules of the placement that need no costs; interleaved ones as far as megatron-core has them."""
    p, m, chunks = problem.num_ranks, problem.num_microbatches, problem.placement.num_chunks
    for generator in SIMPLE if chunks == 1 else ():
        yield generator(p, m)
    with suppress(ScheduleError):
        for interleaved in (interleaved_zb, interleaved_1f1b) if chunks > 1 else ():
            yield interleaved(p, m, num_chunks=chunks, group_size=group_size)


def plan_chunks(problem: Problem, group_size: int | None = None) -> Portfolio:
    """The best plans found, within feasible limits; `group_size` as in `best_in_groups`."""
    portfolio = Portfolio(problem, budget_of(problem))
    if group_size is None:
        _try(portfolio, problem, _choices_of_groups(problem))
    else:
        given = range(0, problem.num_microbatches, group_size)
        _try(portfolio, problem, [tuple(min(group_size, problem.num_microbatches - first) for first in given)])
    if group_size is None:
        portfolio.ensure_plan(problem)
    if problem.has_shards and problem.budget > 0:
        portfolio.insert_shards(problem, lambda without: plan_chunks(without, group_size).best)
    portfolio.improve(problem, int(IMPROVING * problem.budget), keeps_forwards=group_size is not None)
    return portfolio


def _choices_of_groups(problem: Problem) -> list[Groups]:
    """Even groups, first those in which ranks hold as much as they may, then ever smaller and larger ones.

    Rank 0 holds (K (v-1) + p) / v M_B with groups of K, where every rank is one F ahead of the next. In less memory
    than that takes, the best groups have about three quarters as many microbatches as a rank holds.
    """
    p, v, m = problem.num_ranks, problem.placement.num_chunks, problem.num_microbatches
    if v == 1:
        return [(m,)]
    wholes = [footprint.whole for footprint in problem.footprints]
    held = min(
        limit / max(1e-9 * limit, whole)
        for limit, whole in zip(problem.limits, problem.placement.sums(wholes), strict=True)
    )
    most = min(p, m)
    size = round(max(1, min(most, max((v * held - p) / (v - 1), 0.75 * held))))
    step = 1 + size // 8
    near = (size + sign * number * step for number in range(most) for sign in (-1, 1))
    sizes = [size, *(other for other in near if 1 <= other <= most), min(m, most + 2)]
    return list(dict.fromkeys(even_groups(m, size) for size in sizes))


def _try(portfolio: Portfolio, problem: Problem, choices: Sequence[Groups]) -> None:
    """Try plans with these groups, the most promising first."""
    if problem.recomputes:
        for groups in choices[:3]:
            _try_alternating(portfolio, problem, groups, ALL_RULES)
        if problem.recompute is Recompute.PLANNED:
            if problem.budget > 0:
                portfolio.fit(problem, lambda larger: plan_chunks(larger).plans)
            portfolio.drop_into_idle_time(problem)
        return
    tried = [(portfolio.run(InGroups(problem, choices[0])), choices[0])]
    usual = even_groups(problem.num_microbatches, problem.num_ranks)
    if _filling_slope(problem) >= 1:  # with less memory ranks do not take turns in strict order
        _try_alternating(portfolio, problem, usual if usual in choices else choices[0], ALL_RULES[:1])
    enough = portfolio.budget // 2
    for groups in choices[1:]:
        # A few more are tried while no plan fits: one microbatch after the other is several times as slow.
        needs_plan = not portfolio.plans and len(tried) < CHOICES_WITHOUT_PLAN
        if not needs_plan and (portfolio.finished or portfolio.budget < enough):
            break
        tried.append((portfolio.run(InGroups(problem, groups)), groups))
    for _, groups in sorted(tried)[:2]:
        for weights, forwards in RULES:
            if not portfolio.finished:
                portfolio.run(InGroups(problem, groups, weights, forwards))
        _try_alternating(portfolio, problem, groups, ALL_RULES)


def _slopes(problem: Problem) -> tuple[float, ...]:
    """How many F more than the next rank a rank begins with, from the most promising on, as far as memory allows.

    With 2, which is Megatron's, a rank has F until its first B if F = B. Another one is that for the costs and their
    messages, and another one fills the memory of rank 0.
    """
    size = problem.num_stages
    f, b = median(problem.latency[:size]), median(problem.latency[size : 2 * size])
    until_b = (f + b + 2 * median(problem.message or (0,))) / f
    filling = _filling_slope(problem)
    slopes = (2, 1, until_b, min(filling, 2 * until_b), 1.5, 0.75, 1.25)
    most = inf if problem.recomputes else filling * (1 + 1e-9)
    return tuple(dict.fromkeys(slope for slope in slopes if slope <= most))


def _filling_slope(problem: Problem) -> float:
    """How many F more than the next rank each rank can begin with, so that rank 0 fills its memory."""
    chunks = problem.placement.num_chunks
    each = sum(problem.footprints[stage].whole for stage in problem.stages_of[0]) / chunks
    return (problem.limits[0] / each - 1) / max(1, problem.num_ranks - 1) if each > 0 else inf


def _try_alternating(portfolio: Portfolio, problem: Problem, groups: Groups, rules: Sequence[GapRule]) -> None:
    for rule, slope, keeping in product(rules, _slopes(problem), Keeping.choices(problem)):
        if not portfolio.finished:
            portfolio.run(InOrder(problem, alternating_orders(problem, groups, slope), rule, keeping))
