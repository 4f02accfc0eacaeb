"""Estimates the mean time of a plan if operations vary in duration; a plan without slack slows down the most."""

from __future__ import annotations

import random
from functools import lru_cache
from statistics import NormalDist, fmean

from megatron.zero_bubble.planner.critical_paths import OrderGraph
from megatron.zero_bubble.planner.orders import orders_of_schedule
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import PlanRequest
from megatron.zero_bubble.schedule.host_link import without_copies
from megatron.zero_bubble.schedule.timeline import Timeline

DRAWS = 6
"""Number of simulations with random durations; the mean of the simulated times is a schedule's expected time."""
_LARGEST_SPREAD = 0.5
_QUARTILE = NormalDist().inv_cdf(0.75)


def expected_time(request: PlanRequest, timeline: Timeline) -> float:
    """The expected time of a step, computed with the fields `spread` and `time_between` of the request."""
    return slowdown(timeline, request.spread, request.time_between) * request.time_of(timeline)


def slowdown(timeline: Timeline, spread: float, time_between: float) -> float:
    """The mean time of a schedule with random durations, divided by its time with fixed durations.

    The random durations are independent of each other and log-normally distributed.

    Args:
        timeline: a simulation in which all operations of one kind and stage take the same time.
        spread: half the interquartile range of an operation's duration, divided by the median.
        time_between: time that passes between two successive operations of a rank, in the unit of the costs; zero in
            the simulation with fixed durations.

    Returns:
        The mean time of the schedule divided by its time with fixed durations; 1 if `spread` and `time_between` are 0.
    """
    if spread <= 0 and time_between <= 0:
        return 1.0
    schedule = timeline.schedule
    overlap = timeline.overlap_communication
    problem = Problem.solved_by(schedule, timeline.costs, overlap_communication=overlap, takes_makespan=True)
    graph = OrderGraph(problem, orders_of_schedule(problem, without_copies(schedule)))
    usual, until_result = graph.duration, graph.latency
    sigma = min(spread, _LARGEST_SPREAD) / _QUARTILE
    graph.find_times()
    fixed, times = graph.cost, []
    for factors in _factors(sigma, sum(duration > 0 for duration in usual)):
        of_operations = iter(factors)
        of_all = [next(of_operations) if duration > 0 else 0.0 for duration in usual]
        graph.duration, graph.latency = (
            [(time + time_between) * factor for time, factor in zip(times_of_all, of_all, strict=True)]
            for times_of_all in (usual, until_result)
        )
        graph.find_times()
        times.append(graph.cost)
    return fmean(times) / fixed


@lru_cache(maxsize=4)
def _factors(sigma: float, count: int) -> list[list[float]]:
    """`DRAWS` lists of `count` random factors with a log-normal distribution and a median of 1, from fixed seeds."""
    generators = map(random.Random, range(DRAWS))
    return [[generator.lognormvariate(0, sigma) for _ in range(count)] for generator in generators]
