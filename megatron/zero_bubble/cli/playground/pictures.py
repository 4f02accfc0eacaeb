"""Turns a simulated timeline, or the trace of a run, into plain data that a page can draw."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron.zero_bubble.cli.schedule.arguments import CurveFlags
from megatron.zero_bubble.cli.schedule.figures import ScheduleFigures
from megatron.zero_bubble.cli.schedule.memory_curve import VARIANTS, curve_limits
from megatron.zero_bubble.planner.prediction import of_1f1b
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Op, Schedule, ScheduleError, TimedOp, Timeline, critical_path
from megatron.zero_bubble.schedule.analysis import BUBBLE_WORDS, Steps, causes, inputs, memory_over_time
from megatron.zero_bubble.schedule.draw.palette import colour_of_rank, fill_of, is_dark
from megatron.zero_bubble.schedule.formats.json_format import short_integer
from megatron.zero_bubble.schedule.formats.pytorch import placement_of
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.step_ops import operation_name
from megatron.zero_bubble.session.timeline_files import measured_timeline

_CAUSES = {
    "warmup": "#9aa4b2",
    "waiting for F": KINDS[OpKind.F].colour,
    "waiting for B": KINDS[OpKind.B].colour,
    "waiting for validation": KINDS[OpKind.VALIDATE].colour,
    "waiting for copies": KINDS[OpKind.H].colour,
    "communication": KINDS[OpKind.BW].colour,
    "streams": KINDS[OpKind.S].colour,
    "tail": "#57606a",
}
"""Cause of idle time -> color; time spent waiting for an operation has the color of the awaited operation."""


def facts() -> dict[str, Any]:
    """Return the playground page's constants, such as all schedules and the colors of the causes of idle time."""
    return {
        "schedules": [
            {
                "name": entry.name,
                "summary": entry.summary,
                "placement": entry.placement,
                "chunks": entry.num_chunks,
                "takesChunks": entry.takes_num_chunks,
                "takesPlacement": entry.takes_placement,
                "usesCosts": entry.uses_costs,
                "takesLimit": entry.takes_limit,
                "isSlow": entry.is_slow,
            }
            for entry in ENTRIES.values()
        ],
        "causes": _CAUSES,
        # Each curve of `memory-curve --dial`, with the flags of its plans.
        "ways": {variant: dict(flags) for variant, flags in VARIANTS.items()},
        # Memory limits in p M_B; with recomputation, plans exist for smaller limits.
        "limits": {"keeping": _curve_limits(Recompute.NONE), "recomputing": _curve_limits(Recompute.PLANNED)},
        "colours": {
            kind: {"fill": facts.colour, "isDark": is_dark(facts.colour)}
            for kind, facts in KINDS.items()
            if facts.colour
        },
    }


def _curve_limits(recompute: Recompute) -> list[float]:
    return curve_limits(CurveFlags(pipeline_size=2, num_microbatches=1, recompute=recompute.value))


def picture_of(figures: ScheduleFigures, recompute: Recompute, unit: str) -> dict[str, Any]:
    """Return the simulation of a schedule for the page: the values that the command prints, and data to draw."""
    timeline = figures.timeline
    baseline = of_1f1b(timeline, figures.schedule.num_microbatches, recompute)
    drawn = _drawn(timeline, figures.steps)
    speed_up = baseline.makespan / figures.iteration_time
    return {**drawn, "unit": unit, "figures": {**figures.as_json(), "speed_up": speed_up}}


def picture_of_run(timeline: Timeline, memory: Mapping[int, Steps]) -> dict[str, Any]:
    """Return a recorded timeline as data for the page; `memory` is each rank's recorded memory over time, or empty."""
    figures = {
        "schedule": timeline.schedule.name,
        "cost": timeline.cost,
        "makespan": timeline.makespan,
        **timeline.idle.as_json(),
    }
    drawn = _drawn(timeline, 1)
    if memory:
        drawn["memory"] = [memory.get(rank, []) for rank in range(timeline.schedule.num_ranks)]
        figures["peak_memory"] = [max((value for _, value in steps), default=0) for steps in drawn["memory"]]
    return {**drawn, "unit": "ms", "memoryUnit": "MiB", "figures": figures}


def _drawn(timeline: Timeline, steps: int) -> dict[str, Any]:
    schedule = timeline.schedule
    ranks, chunks = range(schedule.num_ranks), schedule.num_chunks
    waits, words = inputs(timeline), dict(BUBBLE_WORDS)
    positions = [{timed.op: position for position, timed in enumerate(lane)} for lane in timeline.lanes]
    fills = {
        kind: [fill_of(kind, chunk, chunks) for chunk in range(chunks)] for kind in KINDS if kind in schedule.kinds
    }
    return {
        "name": schedule.name,
        "stages": [schedule.placement.stages_of(rank) for rank in ranks],
        "kinds": {
            kind: {
                "meaning": KINDS[kind].meaning,
                "waiting": words[KINDS[kind].waiting],
                "fills": each,
                "dark": [is_dark(fill) for fill in each],
            }
            for kind, each in fills.items()
        },
        "rankColours": [colour_of_rank(rank, len(ranks)) for rank in ranks],
        "lanes": [
            [
                {
                    "name": operation_name(timed.op, schedule.num_microbatches // steps, steps),
                    "kind": timed.op.kind,
                    "microbatch": timed.op.microbatch,
                    "chunk": timed.op.chunk,
                    "start": timed.start,
                    "end": timed.end,
                    "holds": holds,
                    "inputs": waits[rank][position],
                }
                for position, (timed, (_, holds, _)) in enumerate(
                    zip(timeline.lanes[rank], timeline.memory_held(rank), strict=True)
                )
            ]
            for rank in ranks
        ],
        "path": [[rank, positions[rank][timed.op]] for rank, timed in critical_path(timeline)],
        "memory": [memory_over_time(timeline, rank) for rank in ranks],
        "causes": causes(timeline),
        "memoryUnit": "M_B",
    }


_MICROSECONDS = 1000
"""Microseconds per millisecond: times are in microseconds in a trace, and in milliseconds in a timeline."""


def is_trace(text: str) -> bool:
    """Return whether `text` begins like a trace in Chrome's format."""
    return '"traceEvents"' in text[:200]


def recorded_run(text: str) -> tuple[Timeline, dict[int, Steps]]:
    """Return the timeline of a recorded iteration, in milliseconds, and the memory that each rank held over time.

    The costs of the timeline are the mean operation times of the recorded iteration, and contain no memory.

    Raises:
        ScheduleError: the text is not the trace of a run.
    """
    with trace_errors():
        events = json.loads(text, parse_int=short_integer)["traceEvents"]
        name = next(event["args"]["name"] for event in events if event["name"] == "process_name")
        lanes = _lanes(events)
        chunks = [{timed.op.chunk: stage for timed, stage in lane if timed.op.kind is OpKind.F} for lane in lanes]
        num_microbatches = 1 + max(timed.op.microbatch for lane in lanes for timed, _ in lane)
        if num_microbatches > min(map(len, lanes)):
            raise ValueError(f"a rank has fewer operations than the {num_microbatches} microbatches")
        placement = placement_of([sorted(stages.values()) for stages in chunks])
        timed = [[timed_op for timed_op, _ in lane] for lane in lanes]
        ops = tuple(tuple(timed_op.op for timed_op in lane) for lane in timed)
        measured = measured_timeline(Schedule(name, placement, num_microbatches, ops), timed, None)
        return measured, _memory_counters(events)


_OF_DAMAGED_TRACES = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration, RecursionError),
)


@contextmanager
def trace_errors() -> Iterator[None]:
    """Turn any error that a damaged trace causes into a `ScheduleError` with a message of one line."""
    try:
        yield
    except _OF_DAMAGED_TRACES as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or "it has no operations"
        raise ScheduleError(f"not a trace that --zero-bubble-timeline wrote: {reason}") from None


def _lanes(events: list[Mapping[str, Any]]) -> list[list[tuple[TimedOp, int]]]:
    """Return for every rank a list of (operation, stage), in the order in which the operations ran."""
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
    return [sorted(lanes[rank], key=lambda timed: timed[0].start) for rank in sorted(lanes)]


def _memory_counters(events: list[Mapping[str, Any]]) -> dict[int, Steps]:
    """Return each rank's recorded memory over time, by rank; an empty dictionary if the run recorded no memory."""
    counters: dict[int, Steps] = defaultdict(list)
    for event in events:
        if event["ph"] == "C" and event["name"].startswith("memory of rank "):
            rank = int(event["name"].removeprefix("memory of rank "))
            counters[rank].append((event["ts"] / _MICROSECONDS, event["args"]["value"]))
    return dict(counters) if any(value for steps in counters.values() for _, value in steps) else {}
