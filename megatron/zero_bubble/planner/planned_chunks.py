"""Plans several chunks a rank from their costs, at any memory limit; in groups of microbatches, as Megatron's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from megatron.zero_bubble.planner.event_loop import GapRule, Keeping
from megatron.zero_bubble.planner.grouped import GroupPolicy, alternating_orders, even_groups
from megatron.zero_bubble.planner.portfolio import IMPROVING, Portfolio, best_of, budget_of, fits, with_shards
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b, interleaved_zb
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

SLOPES = (2, 1, 1.5, 0.75, 1.25)
"""How many F more than the next rank a rank begins with; 2 is Megatron's."""

Groups = tuple[int, ...]
"""The sizes of the groups in which microbatches pass through the chunks."""


def best_interleaved(name: str, group_size: int | None, problem: Problem) -> Schedule:
    """The best of the plan and of the named interleaved schedules that fit.

    Where iterations do not interlock, the best one has the shortest makespan, and not the shortest span.
    With a `group_size` the forwards of every rank are in the order of such groups, if that fits; otherwise the sizes of
    groups are planned, too.
    """
    candidates = [] if group_size is None else _candidates(name, problem, group_size)
    candidates = candidates or _candidates(name, problem, None)
    if not candidates:
        problem.check_feasible()
    return replace(best_of(candidates, problem), name=name)


def _candidates(name: str, problem: Problem, group_size: int | None) -> list[Schedule]:
    """The plan and the named schedules, as far as they fit; `group_size` as in `best_interleaved`."""
    candidates, shortest = [], inf
    if problem.is_feasible:
        portfolio = plan_chunks(problem, group_size)
        candidates, shortest = portfolio.schedules(name, problem), portfolio.cost
        is_best = not problem.varies and portfolio.cost <= problem.bound * (1 + 1e-9)
        if candidates and (problem.leaves_out_named or is_best):
            return candidates
    others = list(_named(problem, group_size))
    if problem.has_shards:
        others = list(with_shards(others, problem, shortest))
    if problem.recompute is Recompute.FULL:
        others += map(with_recomputation, _candidates(name, problem.recomputing_in_backward(), group_size))
    return candidates + [schedule for schedule in others if fits(schedule, problem)]


def _named(problem: Problem, group_size: int | None) -> Iterator[Schedule]:
    """The interleaved schedules that need no costs, if megatron-core has them for so many microbatches."""
    for generator in (interleaved_zb, interleaved_1f1b):
        try:
            schedule = generator(
                problem.num_ranks,
                problem.num_microbatches,
                num_chunks=problem.placement.num_chunks,
                group_size=group_size,
            )
        except ScheduleError:
            return
        if problem.recompute is Recompute.FULL:
            schedule = with_recomputation(schedule)
        yield schedule


def plan_chunks(problem: Problem, group_size: int | None) -> Portfolio:
    """The best plans found, within feasible limits; `group_size` as in `best_interleaved`."""
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
    than that takes, the best groups are found to be about as large as three quarters of what is held.
    """
    p, v, m = problem.num_ranks, problem.placement.num_chunks, problem.num_microbatches
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
        _try_recomputing(portfolio, problem, choices)
        return
    tried = [(portfolio.grouped(problem, GroupPolicy(choices[0])), choices[0])]
    usual = even_groups(problem.num_microbatches, problem.num_ranks)
    _try_alternating(portfolio, problem, usual if usual in choices else choices[0], SLOPES[:2])
    enough = portfolio.budget // 2
    for groups in choices[1:]:
        if portfolio.finished or portfolio.budget < enough:
            break
        tried.append((portfolio.grouped(problem, GroupPolicy(groups)), groups))
    for _, groups in sorted(tried)[:2]:
        _try_rules(portfolio, problem, groups)
        _try_alternating(portfolio, problem, groups, SLOPES)


def _try_rules(portfolio: Portfolio, problem: Problem, groups: Groups) -> None:
    p = problem.num_ranks
    before_last_chunk = (problem.placement.num_chunks - 1) * max(groups)
    leads = [None, *(tuple(before_last_chunk + 1 + round(slope * (p - 1 - r)) for r in range(p)) for slope in (2, 1))]
    rules = product(leads, (False, True), (GapRule.BALANCED, GapRule.NEVER), (GapRule.ALWAYS, GapRule.BALANCED))
    for lead, orders_backwards, weights, forwards in rules:
        if not portfolio.finished:
            portfolio.grouped(problem, GroupPolicy(groups, lead, weights, forwards, orders_backwards))


def _try_alternating(portfolio: Portfolio, problem: Problem, groups: Groups, slopes: Sequence[float]) -> None:
    for slope, rule, keeping in product(slopes, GapRule, Keeping.choices(problem)):
        if not portfolio.finished:
            portfolio.fill(problem, alternating_orders(problem, groups, slope), rule, keeping=keeping)


def _try_recomputing(portfolio: Portfolio, problem: Problem, choices: Sequence[Groups]) -> None:
    """Try the orders of plans without R apart, and F and B in turn."""
    for other in (problem.recomputing_in_backward(), problem.keeping_everything()):
        without = Portfolio(other, problem.budget // 3)
        if other.is_feasible and not portfolio.finished:
            _try(without, other, choices)
        if without.plans:
            orders = problem.f_and_b(without.best.orders)
            for rule, defers in product(GapRule, (False, True)):
                portfolio.fill(problem, orders, rule, keeping=Keeping(defers))
    for groups in choices[:3]:
        _try_alternating(portfolio, problem, groups, SLOPES)
    if problem.recompute is Recompute.PLANNED:
        portfolio.drop_into_idle_time(problem)
