"""Turns a simulated or recorded timeline into plain data that a page can draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.zero_bubble.cli.schedule.arguments import CurveFlags
from megatron.zero_bubble.cli.schedule.figures import ScheduleFigures
from megatron.zero_bubble.cli.schedule.memory_curve import WAYS, curve_limits
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Timeline, critical_path
from megatron.zero_bubble.schedule.analysis import BUBBLE_WORDS, Steps, causes, inputs, memory_over_time
from megatron.zero_bubble.schedule.draw.palette import colour_of_rank, fill_of, is_dark
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.step_ops import operation_name

_CAUSES = {
    "warmup": "#9aa4b2",
    "waiting for F": KINDS[OpKind.F].colour,
    "waiting for B": KINDS[OpKind.B].colour,
    "waiting for validation": KINDS[OpKind.VALIDATE].colour,
    "communication": KINDS[OpKind.BW].colour,
    "streams": KINDS[OpKind.S].colour,
    "tail": "#57606a",
}
"""Colours of the causes of idle time; a rank that waits for an operation has that operation's colour."""


def facts() -> dict[str, Any]:
    """Return the constants of the page: the schedules, and the colours of causes."""
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
        # The curves of the dial, each with the flags that it adds.
        "ways": {way: dict(flags) for way, flags in WAYS.items()},
        # In p M_B; with recomputation there are plans in less memory than without.
        "limits": {"keeping": _curve_limits(Recompute.NONE), "recomputing": _curve_limits(Recompute.PLANNED)},
        "colours": {
            kind: {"fill": facts.colour, "isDark": is_dark(facts.colour)}
            for kind, facts in KINDS.items()
            if facts.colour
        },
    }


def _curve_limits(recompute: Recompute) -> list[float]:
    """The limits of `zero-bubble schedule memory-curve`."""
    return curve_limits(CurveFlags(pipeline_size=2, num_microbatches=1, recompute=recompute.value))


def picture_of(figures: ScheduleFigures, recompute: Recompute, unit: str) -> dict[str, Any]:
    """Return the simulation of a schedule: the figures of the command line, and the drawing of the page."""
    timeline = figures.timeline
    profile = Profile(timeline.schedule.placement, timeline.costs, 0, {})
    baseline = Prediction(profile, timeline.schedule, recompute, lengths=timeline.lengths)
    drawn = _drawn(timeline, figures.steps)
    return {**drawn, "unit": unit, "figures": {**figures.as_json(), "speed_up": baseline.gain.times}}


def picture_of_run(timeline: Timeline, memory: Mapping[int, Steps]) -> dict[str, Any]:
    """Return a recorded timeline; `memory` has the memory of each rank over time, if it was recorded."""
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
