"""A timeline in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from megatron.zero_bubble.schedule.analysis import Steps, idle_ranks_over_time, memory_over_time, messages
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.kinds import POST_VALIDATION
from megatron.zero_bubble.schedule.step_ops import operation_name
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline


def to_chrome_trace(timeline: Timeline, *, microseconds: float = 1000, steps: int = 1) -> str:
    """Write a timeline as a Chrome trace.

    The trace has a thread and a memory counter for each rank, arrows for messages, and a counter of idle ranks. If
    activations are copied to the host, the host link of each rank is another thread of the trace.

    Args:
        timeline: timeline to write.
        microseconds: length of the timeline's unit of time, in microseconds; 1000 if the unit is milliseconds.
        steps: number of iterations of the schedule (see `repeat`).

    Returns:
        The trace as JSON text.
    """
    schedule = timeline.schedule
    events = [_name("process_name", 0, schedule.name)]
    for rank, lane in enumerate(timeline.lanes):
        events.append(_name("thread_name", rank, f"rank {rank}"))
        events += (_event(schedule, rank, timed, microseconds, steps) for timed in lane)
        if timeline.copies:
            link = len(timeline.lanes) + rank
            events.append(_name("thread_name", link, f"host link of rank {rank}"))
            copies = (_event(schedule, rank, timed, microseconds, steps) for timed in timeline.copies[rank])
            events += ({**event, "tid": link} for event in copies)
        events += _counter(f"memory of rank {rank}", memory_over_time(timeline, rank), microseconds)
    events += _flows(timeline, microseconds)
    events += _counter("idle ranks", idle_ranks_over_time(timeline), microseconds)
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}


def _event(schedule: Schedule, rank: int, timed: TimedOp, microseconds: float, steps: int) -> dict[str, Any]:
    """The trace event of one operation: a slice, or an instant if the operation takes no time."""
    op, start, end = timed
    num_microbatches = schedule.num_microbatches // steps
    name = operation_name(op, num_microbatches, steps)
    place = {"pid": 0, "tid": rank, "name": name, "cat": op.kind.value, "ts": float(start) * microseconds}
    length = {"ph": "X", "dur": float(end - start) * microseconds} if end > start else {"ph": "i", "s": "t"}
    if op.kind in POST_VALIDATION:
        return {**place, **length, "args": {"iteration": op.microbatch + 1}}
    iteration, microbatch = divmod(op.microbatch, num_microbatches)
    stage = schedule.placement.stage_of(rank, op.chunk)
    arguments = {"stage": stage, "chunk": op.chunk, "microbatch": microbatch, "iteration": iteration + 1}
    return {**place, **length, "args": arguments}


def _flows(timeline: Timeline, microseconds: float) -> Iterator[dict[str, Any]]:
    """For every message, yield an arrow from the operation that makes the tensor to the operation that uses the tensor.

    Each end of an arrow lies between the start and the end of an operation, so that viewers attach the arrow to the
    operation. A message has no arrow if one of its two operations takes no time.
    """
    numbers = count(1)
    for sender, source, receiver, user in messages(timeline):
        if source.end == source.start or user.end == user.start:
            continue
        flow = {"cat": "message", "name": "message", "id": next(numbers), "pid": 0}
        inside = float(source.start) + 0.99 * float(source.end - source.start)
        yield {**flow, "ph": "s", "tid": sender, "ts": inside * microseconds}
        inside = float(user.start) + 0.01 * float(user.end - user.start)
        yield {**flow, "ph": "f", "bp": "e", "tid": receiver, "ts": inside * microseconds}


def _counter(name: str, steps: Steps, microseconds: float) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "pid": 0, "name": name, "ts": float(time) * microseconds, "args": {"value": float(value)}}
        for time, value in steps
    ]
