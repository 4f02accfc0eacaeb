"""Chooses between whole schedules, by simulation: what the planners know only in part is the judge of all."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.search.problem import Problem, tolerance
from megatron.zero_bubble.schedule.simulate import simulate


def fits(schedule: Schedule, problem: Problem) -> bool:
    """Whether no rank needs more memory than the problem's limits."""
    peaks = peak_memory(schedule, problem.costs)
    return all(peak <= limit + tolerance(limit) for peak, limit in zip(peaks, problem.limits, strict=True))


def best_of(schedules: Iterable[Schedule], problem: Problem) -> Schedule:
    """The schedule whose longest span is shortest; of equals the one with the shortest makespan, or the first."""
    timelines = [
        simulate(schedule, problem.costs, overlap_communication=problem.overlap_communication) for schedule in schedules
    ]
    shortest = min(timeline.cost for timeline in timelines)
    equals = [timeline for timeline in timelines if timeline.cost <= shortest + tolerance(shortest)]
    return min(equals, key=lambda timeline: timeline.makespan).schedule
