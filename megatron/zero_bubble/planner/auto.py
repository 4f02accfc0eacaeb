"""The automatic scheduler for any placement and memory limit; ZB-1p and ZB-2p are two limits of one chunk a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median

from megatron.zero_bubble.planner.dropping import try_dropping
from megatron.zero_bubble.planner.event_loop import GapRule, Keeping
from megatron.zero_bubble.planner.greedy import Policy
from megatron.zero_bubble.planner.memory_limit import one_f_one_b_peaks
from megatron.zero_bubble.planner.planned_chunks import best_interleaved
from megatron.zero_bubble.planner.portfolio import (
    Portfolio,
    best_of,
    budget_of,
    fits,
    recomputed_where_needed,
    with_shards,
)
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.profiles import (
    Profile,
    alternating_orders,
    capacities,
    neighbours,
    profiles,
    sloped_caps,
)
from megatron.zero_bubble.planner.request import PlanRequest, with_room_for_shards
from megatron.zero_bubble.planner.v_shaped import best_in_v
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.generators.gpipe import gpipe
from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.generators.zb_h1 import zb_h1
from megatron.zero_bubble.schedule.generators.zb_h2 import zb_h2
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

SIMPLE = (one_f_one_b, zb_h1, zb_h2, gpipe)
"""The schedules that need no costs. Where they fit, the planned schedule is not worse."""
WORTH_CLIMBING = 0.001
"""The distance from the bound above which single ranks are tuned."""


def auto(request: PlanRequest) -> Schedule:
    """The best schedule found for the costs and the memory limit, by default that of 1F1B.

    With one chunk a rank it searches over the number of F before the first B of every rank, and over rules for the
    gaps. The larger the limit the shorter the span: what a lower limit allows is tried too, in steps of p/8 M_B. Never
    worse than GPipe, 1F1B, ZB-H1 and ZB-H2 where they fit. For several interleaved chunks see `best_interleaved`, for a
    V `best_in_v`. Where only what has no room is recomputed, nothing is without a limit. Raises `Infeasible` with the
    smallest limit that works.
    """
    placement, limits = request.placement, request.limits
    if limits is None:
        peaks = one_f_one_b_peaks(placement, request.stage_costs, request.num_microbatches, request.recompute)
        limits = with_room_for_shards(request, (max(peaks),) * request.num_ranks)
    problem = Problem.of(request, limits)
    if placement.kind == "linear":
        return recomputed_where_needed(problem, partial(_best, "auto"))
    if placement.kind == "interleaved":
        return recomputed_where_needed(problem, partial(best_interleaved, "auto", request.group_size))
    return recomputed_where_needed(problem, partial(best_in_v, "auto"))


def in_multiple_of_1f1b(name: str, factor: int, request: PlanRequest) -> Schedule:
    """The automatic scheduler in `factor` times the memory of 1F1B, p M_B on every rank, in its own M_B.

    In twice that memory the bubble can be close to zero.
    """
    limits = multiple_of_p(request.stage_costs, request.num_ranks, factor, request.recompute)
    limits = with_room_for_shards(request, limits)
    return recomputed_where_needed(Problem.of(request, limits), partial(_best, name))


def multiple_of_p(
    costs: StageCosts, num_ranks: int, factor: float, recompute: Recompute = Recompute.NONE
) -> tuple[float, ...]:
    """Rank -> factor times p M_B, where M_B is the memory of one microbatch on this rank, between F and B.

    The memory that B adds comes on top, because a microbatch can hold more after its B than before it. With full
    recomputation it is factor times 1F1B's peak with the same: p microbatches without the activations that R restores,
    and the memory of one R and one B.
    """
    if recompute is Recompute.FULL:
        each = zip(costs.memory_f, costs.memory_r, costs.memory_b, strict=True)
        return tuple(factor * (num_ranks * (f - r) + r + max(0, b)) for f, r, b in each)
    return tuple(
        factor * num_ranks * kept + max(0, added) for kept, added in zip(costs.memory_f, costs.memory_b, strict=True)
    )


def _best(name: str, problem: Problem) -> Schedule:
    """The best of the plan and of the simple schedules that fit.

    The planner knows B and W as two operations, and reserves the memory that B adds from F on, or from R on. Where a
    rank ends with a gradient that it sends, or B adds memory, a schedule that fuses them may be better.
    """
    candidates, shortest = [], inf
    if problem.is_feasible:
        portfolio = plan_linear(problem)
        candidates, shortest = portfolio.schedules(name, problem), portfolio.cost
        is_best = not problem.varies and portfolio.cost <= problem.bound_if_fused * (1 + 1e-9)
        if problem.leaves_out_named or is_best:
            return best_of(candidates, problem)
    simple = [generator(problem.num_ranks, problem.num_microbatches) for generator in SIMPLE]
    if problem.recompute is Recompute.FULL:
        simple = [with_recomputation(schedule) for schedule in simple]
    if problem.has_shards:
        simple = list(with_shards(simple, problem, shortest))
    candidates += (schedule for schedule in simple if fits(schedule, problem))
    if not candidates:
        problem.check_feasible()
    return replace(best_of(candidates, problem), name=name)


def plan_linear(problem: Problem) -> Portfolio:
    """The best plans found for one chunk a rank, within feasible limits: at least one microbatch after the other."""
    portfolio = Portfolio(problem, budget_of(problem))
    if problem.recompute is Recompute.PLANNED:
        try_dropping(portfolio, problem)
        portfolio.drop_into_idle_time(problem)
    else:
        _try_levels(portfolio, problem)
        _try_equal_stages(portfolio, problem)
    portfolio.ensure_plan(problem)
    if problem.has_shards and problem.budget > 0:
        portfolio.insert_shards(problem, lambda without: plan_linear(without).best)
    portfolio.improve(problem, problem.budget // 4)
    return portfolio


def _try_levels(portfolio: Portfolio, problem: Problem) -> None:
    for level in _levels(problem):
        if portfolio.finished or level.bound >= portfolio.cost:
            return
        _try_level(portfolio, level)


def _levels(problem: Problem) -> Iterator[Problem]:
    """Yield the problem at falling memory limits, in steps of p/8 M_B.

    The first are its own limits, or enough for all microbatches if that is less.
    """
    if problem.recomputes:
        yield problem
        return
    steps = tuple(problem.num_ranks / 8 * memory for memory in problem.costs.memory_f)
    most = (problem.num_microbatches * footprint.whole for footprint in problem.footprints)
    limits = tuple(map(min, problem.limits, most))
    while all(limit >= least for limit, least in zip(limits, problem.smallest_limits, strict=True)):
        yield replace(problem, limits=limits)
        limits = tuple(limit - step for limit, step in zip(limits, steps, strict=True))
        if max(steps) <= 0:
            return


def _try_level(portfolio: Portfolio, problem: Problem) -> None:
    """Try all candidates worth trying at one memory limit, the most promising first."""
    fits_h1 = all(cap >= n for cap, n in zip(capacities(problem), _h1_profile(problem), strict=True))
    if problem.recomputes:
        searches = (_try_profiles,) if fits_h1 else (_try_profiles, try_dropping)
    else:
        searches = (_try_profiles, _try_policies) if fits_h1 else (_try_policies, _try_profiles)
    for search in searches:
        search(portfolio, problem)


def _try_profiles(portfolio: Portfolio, problem: Problem) -> None:
    keepings = Keeping.choices(problem)
    tried: list[tuple[float, Profile, int]] = []
    for profile in profiles(problem):
        for number, keeping in enumerate(keepings):
            if portfolio.finished:
                return
            orders = alternating_orders(problem, profile)
            cost = portfolio.fill(problem, orders, GapRule.BALANCED, keeping=keeping)
            tried.append((cost, profile, number))
    for _, profile, number in sorted(tried)[:2]:
        orders = alternating_orders(problem, profile)
        for rule, target in ((GapRule.BALANCED, portfolio.bound), (GapRule.ALWAYS, 0), (GapRule.NEVER, 0)):
            if not portfolio.finished:
                portfolio.fill(problem, orders, rule, target, keepings[number])
    cost, profile, number = min(tried)
    if cost == portfolio.cost > portfolio.bound * (1 + WORTH_CLIMBING):
        _climb(portfolio, problem, profile, keepings[number])


def _climb(portfolio: Portfolio, problem: Problem, profile: Profile, keeping: Keeping) -> None:
    """Change one profile step by step, as long as that helps."""
    improved = True
    while improved:
        improved = False
        for candidate in neighbours(problem, profile):
            if portfolio.finished:
                return
            before = portfolio.cost
            orders = alternating_orders(problem, candidate)
            if portfolio.fill(problem, orders, GapRule.BALANCED, keeping=keeping) < before * (1 - 1e-9):
                profile, improved = candidate, True
                break


def _try_policies(portfolio: Portfolio, problem: Problem) -> None:
    policies = [
        Policy(GapRule.BALANCED, GapRule.ALWAYS),
        Policy(GapRule.BALANCED, GapRule.BALANCED),
        Policy(GapRule.NEVER, GapRule.BALANCED),
        Policy(GapRule.NEVER, GapRule.NEVER),
        *(Policy(caps=caps) for caps in sloped_caps(problem)),
    ]
    for policy in policies:
        if portfolio.finished:
            return
        portfolio.greedy(problem, policy)


def _try_equal_stages(portfolio: Portfolio, problem: Problem) -> None:
    """Try the plans, in p and in 2p M_B, of the same problem with the median costs on all stages."""
    costs = replace(
        problem.costs,
        time_f=(median(problem.costs.time_f),) * problem.num_stages,
        time_b=(median(problem.costs.time_b),) * problem.num_stages,
        time_w=(median(problem.costs.time_w),) * problem.num_stages,
        time_r=(median(problem.costs.time_r),) * problem.num_stages,
        time_comm=(median(problem.costs.time_comm or (0,)),) * (problem.num_stages - 1),
        # Exchanges take no time of their own outside of pairs, which are planned later.
        all_to_all_f=(),
        all_to_all_b=(),
    )
    if costs == problem.costs:
        return
    for factor in (2, 1):
        limits = multiple_of_p(problem.costs, problem.num_ranks, factor, problem.recompute)
        if portfolio.finished or any(limit > own for limit, own in zip(limits, problem.limits, strict=True)):
            continue
        if any(limit < least for limit, least in zip(limits, problem.smallest_limits, strict=True)):
            continue
        equal = replace(problem, costs=costs, limits=limits)
        portfolio.in_order(problem, plan_linear(replace(equal, budget=problem.budget // 2)).best.orders)


def _h1_profile(problem: Problem) -> Profile:
    return tuple(min(problem.num_ranks - rank, problem.num_microbatches) for rank in range(problem.num_ranks))
