"""The time that a plan is expected to take where durations vary: an order without any slack loses most."""

from __future__ import annotations

import random
from statistics import NormalDist, fmean

from megatron.zero_bubble.planner.critical_paths import OrderGraph
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import PlanRequest
from megatron.zero_bubble.schedule.host_link import without_copies
from megatron.zero_bubble.schedule.timeline import Timeline

DRAWS = 6
"""Simulations with durations drawn at random."""
_LARGEST_SPREAD = 0.5
_QUARTILE = NormalDist().inv_cdf(0.75)


def expected_time(request: PlanRequest, timeline: Timeline) -> float:
    """The time of a step that is expected if durations vary as much as the request says."""
    return slowdown(timeline, request.spread, request.time_between) * request.time_of(timeline)


def slowdown(timeline: Timeline, spread: float, time_between: float) -> float:
    """How many times as long as simulated a schedule takes, in the mean, if the durations of its operations vary.

    The logarithms of the durations of operations are drawn from a normal distribution, independently of each other.

    Args:
        timeline: the simulation with the same duration for all operations of one kind and stage.
        spread: half the interquartile range of a duration over its median.
        time_between: time between two operations of a rank, which the simulation does not have.
    """
    if spread <= 0 and time_between <= 0:
        return 1.0
    schedule = timeline.schedule
    problem = Problem(
        schedule.placement,
        schedule.num_microbatches,
        timeline.costs.in_groups(schedule.groups),
        (0.0,) * schedule.num_ranks,
        timeline.overlap_communication,
        takes_makespan=True,
    )
    graph = OrderGraph(problem, problem.orders(without_copies(schedule)))
    usual = list(graph.duration)
    sigma = min(spread, _LARGEST_SPREAD) / _QUARTILE
    graph.find_times()
    without, times = graph.cost, []
    for draw in range(DRAWS):
        generator = random.Random(draw)
        graph.duration = [
            duration and (duration + time_between) * generator.lognormvariate(0, sigma) for duration in usual
        ]
        graph.latency = graph.duration
        graph.find_times()
        times.append(graph.cost)
    return fmean(times) / without
