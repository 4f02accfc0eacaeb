"""The curves below the lanes: idle ranks and memory over time, as steps."""

from __future__ import annotations

from collections import Counter

from megatron.zero_bubble.schedule.memory import memory_held
from megatron.zero_bubble.schedule.timeline import Timeline

Steps = list[tuple[float, float]]
"""(time, value): the value holds from its time on, until the next."""


def idle_ranks(timeline: Timeline) -> Steps:
    """How many ranks do not compute, over time."""
    changes: Counter[float] = Counter()
    for lane in timeline.lanes:
        for timed in lane:
            changes[timed.start] -= 1
            changes[timed.end] += 1
    idle = len(timeline.lanes)
    steps: Steps = []
    for time in sorted(changes):
        idle += changes[time]
        if not steps or steps[-1][1] != idle:
            steps.append((time, idle))
    return steps


def memory(timeline: Timeline, rank: int) -> Steps:
    """What the operations of `rank` hold, over time, in the unit of the costs."""
    steps: Steps = [(0, 0)]
    held = memory_held(timeline.schedule, timeline.costs, rank)
    for timed, (_, during, after) in zip(timeline.lanes[rank], held, strict=True):
        if steps[-1][0] == timed.start:
            steps.pop()  # released and allocated at the same moment
        steps += [(timed.start, during), (timed.end, after)]
    return steps
