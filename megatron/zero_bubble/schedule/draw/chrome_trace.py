"""A timeline in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron.zero_bubble.schedule.analysis import Steps, idle_ranks_over_time, memory_over_time
from megatron.zero_bubble.schedule.graph import Node, arrivals, nodes_of
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.kinds import POST_VALIDATION
from megatron.zero_bubble.schedule.step_ops import operation_name
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline


def to_chrome_trace(timeline: Timeline, *, microseconds: float = 1000, steps: int = 1) -> str:
    """The trace as text: a thread a rank, arrows for messages, a counter of memory a rank, and one of the idle ranks.

    Where activations are copied to the host, the host link of each rank is a thread as well. `microseconds` is how
    long the unit of the costs' times is: 1000 for milliseconds. `steps` is how many iterations `repeat` made the
    schedule of.
    """
    schedule = timeline.schedule
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": schedule.name}}
    ]
    for rank, lane in enumerate(timeline.lanes):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events += (_event(schedule, rank, timed, microseconds, steps) for timed in lane)
        if timeline.copies:
            link = len(timeline.lanes) + rank
            name = {"name": f"host link of rank {rank}"}
            events.append({"ph": "M", "pid": 0, "tid": link, "name": "thread_name", "args": name})
            copies = (_event(schedule, rank, timed, microseconds, steps) for timed in timeline.copies[rank])
            events += ({**event, "tid": link} for event in copies)
        events += _counter(f"memory of rank {rank}", memory_over_time(timeline, rank), microseconds)
    events += _flows(timeline, microseconds)
    events += _counter("idle ranks", idle_ranks_over_time(timeline), microseconds)
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _event(schedule: Schedule, rank: int, timed: TimedOp, microseconds: float, steps: int) -> dict[str, Any]:
    """One operation: a slice, or an instant if it takes no time (STEP, VALIDATE and L, simulated)."""
    op, start, end = timed
    num_microbatches = schedule.num_microbatches // steps
    name = operation_name(op, num_microbatches, steps)
    place = {"pid": 0, "tid": rank, "name": name, "cat": op.kind.value, "ts": float(start) * microseconds}
    length = {"ph": "X", "dur": float(end - start) * microseconds} if end > start else {"ph": "i", "s": "t"}
    if op.kind in POST_VALIDATION:
        return {**place, **length, "args": {"iteration": op.microbatch + 1}}
    iteration, microbatch = divmod(op.microbatch, num_microbatches)
    stage = schedule.placement.stage_of(rank, op.chunk)
    which = {"stage": stage, "chunk": op.chunk, "microbatch": microbatch, "iteration": iteration + 1}
    return {**place, **length, "args": which}


def _flows(timeline: Timeline, microseconds: float) -> Iterator[dict[str, Any]]:
    """A flow for every result that a message brings to another rank: from the operation that makes it to its user.

    Both ends are inside of their operations, to which viewers bind them.
    """
    schedule, placement = timeline.schedule, timeline.schedule.placement
    made: dict[Node, tuple[int, TimedOp]] = {}
    for rank, lane in enumerate(timeline.lanes):
        for timed in lane:
            if timed.op.kind not in POST_VALIDATION and timed.end > timed.start:
                made |= dict.fromkeys(nodes_of(placement, rank, timed.op), (rank, timed))
    number = 0
    for rank, lane in enumerate(timeline.lanes):
        for timed in lane:
            if timed.op.kind in POST_VALIDATION or timed.end <= timed.start:
                continue
            for arrival in arrivals(schedule, rank, timed.op):
                if arrival.is_reduced or arrival.node not in made:
                    continue
                sender, source = made[arrival.node]
                number += 1
                flow = {"cat": "message", "name": "message", "id": number, "pid": 0}
                inside = float(source.start) + 0.99 * float(source.end - source.start)
                yield {**flow, "ph": "s", "tid": sender, "ts": inside * microseconds}
                inside = float(timed.start) + 0.01 * float(timed.end - timed.start)
                yield {**flow, "ph": "f", "bp": "e", "tid": rank, "ts": inside * microseconds}


def _counter(name: str, steps: Steps, microseconds: float) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "pid": 0, "name": name, "ts": float(time) * microseconds, "args": {"value": float(value)}}
        for time, value in steps
    ]
