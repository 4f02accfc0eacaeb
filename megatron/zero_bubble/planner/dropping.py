"""Searches which microbatches to drop, for one chunk a rank, together with the number in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import floor
from typing import Any

from megatron.zero_bubble.planner.event_loop import GapRule, Keeping
from megatron.zero_bubble.planner.greedy import Policy
from megatron.zero_bubble.planner.portfolio import Portfolio
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.profiles import Profile, alternating_orders, capacities, turns
from megatron.zero_bubble.schedule.recomputation import Recompute

START_SLOPES = (1, 1.5, 0.75, 2, 0.5, 1.25, 1.75)
SLOPES = tuple(eighths / 8 for eighths in range(2, 19))
OFFSETS = (0.2, 0.6, 0.99, 1.5, 2.2)


@dataclass(frozen=True)
class _Candidate:
    """A plan to try. The number of microbatches in flight falls linearly from the first rank to the last."""

    slope: float
    """Microbatches a rank; 1 is the line of ZB-H1, 2 that of ZB-H2."""
    has_order: bool
    """Whether F and B alternate in a given order, or every free rank chooses by rules."""
    offset: float = 0.6
    """Microbatches on every rank beyond the first one."""
    follows_times: bool = False
    """Whether the line is that of the times from F to B, and not of the ranks."""
    weights: GapRule = GapRule.BALANCED
    forwards: GapRule = GapRule.NEVER
    defers_weights: bool = True
    num_ranks_dropping: int = 0
    """So many ranks drop everything; the others drop the first microbatch, which is restored before any B is there."""
    window: tuple[int | None, int] = (None, 0)
    """How many microbatches at the beginning and at the end may be dropped, if not all."""


def try_dropping(portfolio: Portfolio, problem: Problem) -> None:
    """Try candidates of both kinds, and change the best of each step by step as long as that helps."""
    half = problem.num_ranks // 2
    for has_order, window in product((True, False), ((None, 0), (half, half))):
        tried = []
        for slope in START_SLOPES:
            candidate = _Candidate(slope, has_order, window=window)
            tried.append((_cost(portfolio, problem, candidate), slope))
            if portfolio.finished:
                return
        cost, slope = min(tried)
        _improve(portfolio, problem, _Candidate(slope, has_order, window=window), cost)


def _improve(portfolio: Portfolio, problem: Problem, best: _Candidate, cost: float) -> None:
    seen = {best}
    before = float("inf")
    while cost < before * (1 - 1e-9):
        before = cost
        for change in _changes(problem, best.has_order):
            candidate = replace(best, **change)
            if candidate in seen:
                continue
            if portfolio.finished:
                return
            seen.add(candidate)
            found = _cost(portfolio, problem, candidate)
            if found < cost * (1 - 1e-9):
                best, cost = candidate, found


def _changes(problem: Problem, has_order: bool) -> Iterator[dict[str, Any]]:
    """Changes of a candidate, one after the other."""
    if problem.recompute is Recompute.PLANNED:
        yield from _choices_of_drops(problem.num_ranks, problem.num_microbatches)
    yield from ({"defers_weights": defers} for defers in (False, True))
    yield from ({"weights": rule} for rule in GapRule)
    if not has_order:
        yield from ({"forwards": rule} for rule in GapRule)
    yield from ({"offset": offset} for offset in OFFSETS)
    yield from ({"slope": slope} for slope in SLOPES)
    yield from ({"follows_times": follows} for follows in (False, True))


def _choices_of_drops(num_ranks: int, num_microbatches: int) -> Iterator[dict[str, Any]]:
    yield from ({"num_ranks_dropping": ranks} for ranks in sorted({i * num_ranks // 8 for i in range(8)}))
    sizes = sorted({0, 1, 2, num_ranks // 4, num_ranks // 2, num_ranks})
    windows = [window for window in product(sizes, sizes) if sum(window) < num_microbatches]
    yield from ({"window": window} for window in ((None, 0), *windows))


def _cost(portfolio: Portfolio, problem: Problem, candidate: _Candidate) -> float:
    m, dropping = problem.num_microbatches, candidate.num_ranks_dropping
    drops = {(stage, k) for stage in range(problem.num_stages - 1) for k in range(m if stage < dropping else 1)}
    keeping = Keeping(candidate.defers_weights, frozenset(drops), *candidate.window)
    profile = _profile(problem, candidate)
    if candidate.has_order:
        return portfolio.fill(problem, alternating_orders(problem, profile), candidate.weights, keeping=keeping)
    return portfolio.greedy(problem, Policy(candidate.weights, candidate.forwards, profile, keeping))


def _profile(problem: Problem, candidate: _Candidate) -> Profile:
    hops = [float(problem.num_ranks - 1 - rank) for rank in range(problem.num_ranks)]
    line: Sequence[float] = hops
    if candidate.follows_times and hops[0] > 0:
        turn = turns(problem)
        line = [hops[0] * time / turn[0] for time in turn]
    counts = (1 + problem.num_delayed + floor(candidate.offset + candidate.slope * x) for x in line)
    return tuple(max(1, min(cap, count)) for cap, count in zip(capacities(problem), counts, strict=True))
