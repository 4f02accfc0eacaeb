"""Plans an interleaved placement from its costs, at any memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_1f1b, interleaved_zb
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.search.event_loop import GapRule, Keeping, PlannedOrders
from megatron.zero_bubble.schedule.search.portfolio import Portfolio, best_of, fits
from megatron.zero_bubble.schedule.search.problem import Order, Problem

BUDGET = 600_000
"""Operations to plan in all candidates together: a second or so."""
LEAST_CANDIDATES = 12
"""Candidates to try however large the schedule is."""


def best_interleaved(name: str, group_size: int | None, problem: Problem) -> Schedule:
    """The best of what is planned and of the named interleaved schedules that fit.

    Groups have `group_size` microbatches, by default as many as there are ranks.
    """
    candidates = []
    if problem.is_feasible:
        plan = plan_interleaved(problem, group_size)
        candidates.append(problem.schedule(name, plan.orders))
        if plan.cost <= problem.bound * (1 + 1e-9):
            return candidates[0]
    candidates += (schedule for schedule in _named(problem, group_size) if fits(schedule, problem))
    if not candidates:
        problem.check_feasible()
    return replace(best_of(candidates, problem), name=name)


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
            if group_size is not None:
                raise
            return
        yield with_recomputation(schedule) if problem.recompute is Recompute.FULL else schedule


def plan_interleaved(problem: Problem, group_size: int | None = None) -> PlannedOrders:
    """The best plan found for several chunks a rank; `group_size` as above."""
    portfolio = Portfolio(problem.bound, max(BUDGET, LEAST_CANDIDATES * problem.num_ops))
    portfolio.in_order(problem, problem.one_by_one())
    keepings = (Keeping(), Keeping(defers_weights=True))[: 1 + problem.recomputes]
    for orders, rule, keeping in product(_candidates(problem, group_size), GapRule, keepings):
        if not portfolio.finished:
            portfolio.fill(problem, orders, rule, keeping=keeping)
    if problem.recompute is Recompute.PLANNED:
        portfolio.drop_into_idle_time(problem)
    assert portfolio.best is not None, "one microbatch after the other fits in any limit that is feasible"
    return portfolio.best


def _candidates(problem: Problem, group_size: int | None) -> Iterator[list[Order]]:
    """Orders of F and B, the most promising first."""
    p, m = problem.num_ranks, problem.num_microbatches
    # No group is smaller than p, where there are as many: ranks would wait for its first microbatch to come back.
    num_groups = max(1, m // p)
    groups = [m // num_groups + (number < m % num_groups) for number in range(num_groups)]
    if group_size is not None:
        groups = [min(group_size, m - first) for first in range(0, m, group_size)]
    before_last_chunk = (problem.placement.num_chunks - 1) * groups[0]
    for factor in (2, 1):
        yield [_alternating(problem, rank, groups, before_last_chunk + factor * (p - 1 - rank)) for rank in range(p)]


def _alternating(problem: Problem, rank: int, groups: Sequence[int], warmup: int) -> Order:
    """The F and B of these groups of microbatches in turn, after `warmup` F."""
    size, stages = problem.num_stages, problem.stages_of[rank]
    forwards = [stage for group in groups for stage in stages for _ in range(group)]
    backwards = [size + stage for group in groups for stage in reversed(stages) for _ in range(group)]
    order = forwards[:warmup]
    for number, backward in enumerate(backwards):
        order += [*forwards[warmup + number : warmup + number + 1], backward]
    return order
