"""Plans schedules for linear and interleaved placements, from the costs and within any memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from math import floor, inf
from operator import add
from statistics import median

from megatron.zero_bubble.planner.fill import InOrder
from megatron.zero_bubble.planner.grouped import InGroups, alternating_orders, even_groups, warmup_length
from megatron.zero_bubble.planner.portfolio import FAR, Portfolio, best_of, fits, with_shards
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.rules import GapRule, Keeping
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.generators.gpipe import gpipe
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b, interleaved_zb
from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.generators.zb_h1 import zb_h1
from megatron.zero_bubble.schedule.generators.zb_h2 import zb_h2
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

SIMPLE = (one_f_one_b, zb_h1, zb_h2, gpipe)
"""Generators of the named schedules with one chunk per rank; these generators need no costs."""
ALL_RULES = (GapRule.BALANCED, GapRule.ALWAYS, GapRule.NEVER)
"""Rules that decide whether a W fills a gap shorter than the W, the most promising rule first."""
RULES = (
    (GapRule.NEVER, GapRule.ALWAYS),
    (GapRule.BALANCED, GapRule.BALANCED),
    (GapRule.NEVER, GapRule.NEVER),
)
"""Pairs (rule for gaps shorter than a W, rule for gaps shorter than an F) to try with the two best group sizes."""

STEEPNESS = (0.75, 0.82, 0.88, 1)
"""Fractions x to try: the limit on microbatches in flight falls from n on rank 0 to n - x (n - 1) on the last rank."""
CHOICES_WITHOUT_PLAN = 5
"""Number of group sizes that are tried even after the budget is spent, as long as no plan fits in memory."""

Groups = tuple[int, ...]
"""The sizes of the groups in which microbatches pass through the chunks."""


def best_in_groups(problem: Problem) -> Schedule:
    """Return the best schedule that fits in memory, among planned schedules and named schedules such as 1F1B.

    A named schedule with fused B and W can be faster than the plan, because the planner keeps B and W separate. In
    addition, the planner reserves memory for B when F or R starts.

    Args:
        problem: a problem with a linear or an interleaved placement.

    Raises:
        Infeasible: no schedule fits in the memory limits or, with a group size, no schedule with groups of this size.
    """
    candidates = _candidates(problem)
    if not candidates:
        problem.check_feasible()
        limits = problem.smallest_limits
        message = f"no schedule with groups of {problem.group_size} microbatches fits in memory"
        raise Infeasible(message, max(limits), limits)
    return best_of(candidates, problem)


def _candidates(problem: Problem) -> list[Schedule]:
    """The plans and the named schedules that fit in memory, with groups of `problem.group_size` microbatches if set."""
    candidates, shortest = [], inf
    if problem.is_feasible:
        portfolio = plan_chunks(problem)
        candidates, shortest = portfolio.schedules, portfolio.cost
        is_best = not problem.varies and portfolio.cost <= problem.bound_if_fused * (1 + 1e-9)
        # With `Recompute.PLANNED` a plan without R that fits in memory was already compared with the named schedules.
        is_compared = problem.recompute is Recompute.PLANNED and problem.keeping_everything().is_feasible
        # With an effort of zero, inserting vocabulary shards into the named schedules would take too long.
        is_quick = problem.has_shards and problem.budget == 0
        if candidates and (is_best or is_compared or is_quick):
            return candidates
    others = list(_named(problem))
    if problem.recompute is Recompute.FULL:
        others = [with_recomputation(schedule) for schedule in others]
    if problem.has_shards:
        others = list(with_shards(others, problem, shortest))
    if problem.recompute is Recompute.FULL:
        others += map(with_recomputation, _candidates(problem.recomputing_in_backward()))
    return candidates + [schedule for schedule in others if fits(schedule, problem)]


def _named(problem: Problem) -> Iterator[Schedule]:
    """Yield the named schedules of the placement that need no costs and exist for this number of microbatches."""
    p, m, chunks = problem.num_ranks, problem.num_microbatches, problem.placement.num_chunks
    for generator in SIMPLE if chunks == 1 else ():
        yield generator(p, m)
    with suppress(ScheduleError):
        for interleaved in (interleaved_zb, interleaved_1f1b) if chunks > 1 else ():
            yield interleaved(p, m, num_chunks=chunks, group_size=problem.group_size)


def plan_chunks(problem: Problem) -> Portfolio:
    """Plan a feasible problem, and return the best plans; there may be none if the problem has a group size."""
    portfolio, group_size = Portfolio(problem), problem.group_size
    if group_size is None:
        _try(portfolio, _choices_of_groups(problem))
        portfolio.ensure_plan()
    else:
        given = range(0, problem.num_microbatches, group_size)
        _try(portfolio, [tuple(min(group_size, problem.num_microbatches - first) for first in given)])
    portfolio.insert_shards(plan_chunks)
    portfolio.improve(problem.budget)
    return portfolio


def _choices_of_groups(problem: Problem) -> list[Groups]:
    """The group sizes to try: first the size that fills the memory of a rank, then smaller and larger sizes in turn.

    Let each group have K microbatches, and each of p ranks v chunks. If the warmup of every rank has one F more than
    the warmup of the next rank, rank 0 needs memory for (K (v-1) + p) / v microbatches. If memory is short, the best
    group size is about three quarters of the number of microbatches in flight.
    """
    p, v, m = problem.num_ranks, problem.placement.num_chunks, problem.num_microbatches
    if v == 1:
        return [(m,)]
    memory = zip(problem.limits, problem.whole_memory, strict=True)
    in_flight = min(limit / whole if whole > 0 else inf for limit, whole in memory)
    most = min(p, m)
    size = round(max(1, min(most, max((v * in_flight - p) / (v - 1), 0.75 * in_flight))))
    step = 1 + size // 8
    near = (size + sign * number * step for number in range(most) for sign in (-1, 1))
    sizes = [size, *(other for other in near if 1 <= other <= most), min(m, most + 2)]
    return list(dict.fromkeys(even_groups(m, size) for size in sizes))


def _try(portfolio: Portfolio, choices: Sequence[Groups]) -> None:
    """Plan with the group sizes in `choices`, the most promising first; keep the best plans in `portfolio`."""
    problem = portfolio.problem
    if problem.recomputes:
        for groups in choices[:3]:
            _try_alternating(portfolio, groups, ALL_RULES)
        if problem.recompute is Recompute.PLANNED:
            if problem.budget > 0:
                portfolio.fit(plan_chunks)
            portfolio.drop_into_idle_time()
        return
    tried = [(portfolio.run(InGroups(problem, choices[0])), choices[0])]
    usual = even_groups(problem.num_microbatches, problem.num_ranks)
    if _filling_slope(problem) >= 1:  # with less memory F and B do not alternate strictly
        _try_alternating(portfolio, usual if usual in choices else choices[0], ALL_RULES[:1])
    elif problem.placement.num_chunks == 1:
        portfolio.run_all(InGroups(problem, choices[0], in_flight_limits=most) for most in _sloped(problem))
    enough = portfolio.budget // 2
    for groups in choices[1:]:
        # While no plan fits, more group sizes are tried, because one microbatch at a time is several times as slow.
        needs_plan = not portfolio.plans and len(tried) < CHOICES_WITHOUT_PLAN
        if not needs_plan and (portfolio.finished or portfolio.budget < enough):
            break
        if not any(cost > FAR * portfolio.cost and _is_beyond(groups, others, choices[0]) for cost, others in tried):
            tried.append((portfolio.run(InGroups(problem, groups)), groups))
    for _, groups in sorted(tried)[:2]:
        portfolio.run_all(InGroups(problem, groups, weights, forwards) for weights, forwards in RULES)
        _try_alternating(portfolio, groups, ALL_RULES)
        limits = product(_in_flight_limits(problem, groups), (GapRule.BALANCED, GapRule.NEVER))
        portfolio.run_all(InGroups(problem, groups, weights, in_flight_limits=most) for most, weights in limits)


def _is_beyond(groups: Groups, others: Groups, first: Groups) -> bool:
    """Whether the largest size in `others` lies between the largest sizes in `first` and in `groups`."""
    return max(groups) < max(others) < max(first) or max(groups) > max(others) > max(first)


def _slopes(problem: Problem) -> tuple[float, ...]:
    """Slopes to try, the most promising first; a slope is the number of F by which warmups of successive ranks differ.

    With Megatron's slope, a difference of 2 F between the warmups of successive ranks, no rank is idle before its first
    B if F takes as long as B. With the slope `until_b`, which is computed from durations and message times, no rank is
    idle before its first B even if F and B differ in duration. With the slope `_filling_slope`, the activations of the
    warmup fill the memory of rank 0.
    """
    size = problem.num_stages
    f, b = median(problem.latency[:size]), median(problem.latency[size : 2 * size])
    until_b = (f + b + 2 * median(problem.message or (0,))) / f
    filling = _filling_slope(problem)
    slopes = (2, 1, until_b, min(filling, 2 * until_b), 1.5, 0.75, 1.25)
    most = inf if problem.recomputes else filling * (1 + 1e-9)
    return tuple(dict.fromkeys(slope for slope in slopes if slope <= most))


def _filling_slope(problem: Problem) -> float:
    """The slope (see `_slopes`) with which the activations of the warmup fill the memory of rank 0."""
    each = problem.whole_memory[0] / problem.placement.num_chunks
    return (problem.limits[0] / each - 1) / max(1, problem.num_ranks - 1) if each > 0 else inf


def _sloped(problem: Problem) -> Iterator[tuple[int, ...]]:
    """For one chunk per rank, yield limits on microbatches in flight that fall from the first rank to the last.

    On ranks near the last stage, B follows F sooner, so that more microbatches in flight would not keep these ranks
    busier.
    """
    size = problem.num_stages
    times = list(map(add, problem.latency[:size], problem.latency[size : 2 * size]))
    shares = [sum(times[:stage]) / max(sum(times[:-1]), times[0]) for stage in range(size)]
    whole = problem.footprints[0].whole
    most = floor(problem.limits[0] / whole + 1e-9) if whole > 0 else problem.num_microbatches
    for steepness in STEEPNESS:
        yield tuple(max(1, floor(most - steepness * (most - 1) * share + 1e-9)) for share in shares)


def _in_flight_limits(problem: Problem, groups: Groups) -> Iterator[tuple[int, ...]]:
    """For several chunks per rank, yield every rank's limit on microbatches in flight, as in `alternating_orders`."""
    for slope in (2, 1) if problem.placement.num_chunks > 1 else ():
        yield tuple(1 + warmup_length(problem, rank, groups, slope) for rank in range(problem.num_ranks))


def _try_alternating(portfolio: Portfolio, groups: Groups, rules: Sequence[GapRule]) -> None:
    problem = portfolio.problem
    portfolio.run_all(
        InOrder(problem, alternating_orders(problem, groups, slope), rule, keeping)
        for rule, slope, keeping in product(rules, _slopes(problem), Keeping.choices(problem))
    )
