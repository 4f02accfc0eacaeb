"""A timeline in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from typing import Any

from megatron.zero_bubble.schedule.draw import curves
from megatron.zero_bubble.schedule.timeline import Timeline


def to_chrome_trace(timeline: Timeline, *, microseconds: float = 1000) -> str:
    """The trace as text: a thread a rank, a counter of memory a rank, and one of the idle ranks.

    `microseconds` is how long the unit of the costs' times is: 1000 for milliseconds.
    """
    schedule = timeline.schedule
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": schedule.name}}
    ]
    for rank, lane in enumerate(timeline.lanes):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        for op, start, end in lane:
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "name": str(op),
                    "cat": op.kind.value,
                    "ts": float(start) * microseconds,
                    "dur": float(end - start) * microseconds,
                    "args": {
                        "stage": schedule.placement.stage_of(rank, op.chunk),
                        "chunk": op.chunk,
                        "microbatch": op.microbatch,
                    },
                }
            )
        events += _counter(f"memory of rank {rank}", curves.memory(timeline, rank), microseconds)
    events += _counter("idle ranks", curves.idle_ranks(timeline), microseconds)
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _counter(name: str, steps: curves.Steps, microseconds: float) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "pid": 0, "name": name, "ts": float(time) * microseconds, "args": {"value": float(value)}}
        for time, value in steps
    ]
