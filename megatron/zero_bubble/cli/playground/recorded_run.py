"""Reads the trace that `--zero-bubble-timeline` writes of an iteration back into a timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from megatron.zero_bubble.schedule import Op, OpKind, Schedule, ScheduleError, TimedOp, Timeline
from megatron.zero_bubble.schedule.analysis import Steps
from megatron.zero_bubble.schedule.formats.pytorch import placement_of
from megatron.zero_bubble.session.timeline_files import measured_timeline

_MICROSECONDS = 1000
"""Microseconds in the unit of a recorded timeline, milliseconds."""


def is_trace(text: str) -> bool:
    """Whether the text looks like a trace in Chrome's format."""
    return '"traceEvents"' in text[:200]


def recorded_run(text: str) -> tuple[Timeline, dict[int, Steps]]:
    """Return the timeline of a recorded iteration, in milliseconds, and the memory that each rank held over time.

    The costs of the timeline are the mean times of that iteration, without memory. Raises `ScheduleError`.
    """
    try:
        events = json.loads(text)["traceEvents"]
        name = next(event["args"]["name"] for event in events if event["name"] == "process_name")
        lanes = _lanes(events)
        chunks = [{timed.op.chunk: stage for timed, stage in lane if timed.op.kind is OpKind.F} for lane in lanes]
        num_microbatches = 1 + max(timed.op.microbatch for lane in lanes for timed, _ in lane)
        placement = placement_of([sorted(stages.values()) for stages in chunks])
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ScheduleError(
            f"not a trace that --zero-bubble-timeline wrote: {error or 'it has no operations'}"
        ) from None
    timed = [[timed_op for timed_op, _ in lane] for lane in lanes]
    ops = tuple(tuple(timed_op.op for timed_op in lane) for lane in timed)
    return measured_timeline(Schedule(name, placement, num_microbatches, ops), timed, None), _memory_counters(events)


def _lanes(events: list[Mapping[str, Any]]) -> list[list[tuple[TimedOp, int]]]:
    """The operations of every rank in the order in which they ran, each with its stage."""
    lanes: dict[int, list[tuple[TimedOp, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] not in ("X", "i"):
            continue
        args = event["args"]
        op = Op(OpKind(event["cat"]), args.get("microbatch", 0), args.get("chunk", 0))
        start = event["ts"] / _MICROSECONDS
        lanes[event["tid"]].append(
            (TimedOp(op, start, start + event.get("dur", 0) / _MICROSECONDS), args.get("stage", 0))
        )
    return [sorted(lanes[rank], key=lambda one: one[0].start) for rank in sorted(lanes)]


def _memory_counters(events: list[Mapping[str, Any]]) -> dict[int, Steps]:
    """Rank -> the counter of its memory; nothing where the run knew no memory."""
    counters: dict[int, Steps] = defaultdict(list)
    for event in events:
        if event["ph"] == "C" and event["name"].startswith("memory of rank "):
            rank = int(event["name"].removeprefix("memory of rank "))
            counters[rank].append((event["ts"] / _MICROSECONDS, event["args"]["value"]))
    return dict(counters) if any(value for steps in counters.values() for _, value in steps) else {}
