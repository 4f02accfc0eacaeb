"""Writes drawings of a measured timeline and of the simulation of its schedule. The module is pure Python."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

from megatron.zero_bubble.schedule import OpKind, Schedule, StageCosts, TimedOp, Timeline, simulate
from megatron.zero_bubble.schedule.analysis import by_result, causes, fused_saving
from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.costs import OPTIONAL
from megatron.zero_bubble.schedule.draw import html_document, to_chrome_trace, to_html, to_svg
from megatron.zero_bubble.schedule.kinds import POST_VALIDATION, TIMES
from megatron.zero_bubble.schedule.pairs import pairs
from megatron.zero_bubble.schedule.simulate import simulates_lengths
from megatron.zero_bubble.session.files import write_file

_MARGINS, _OP_WIDTH, _WIDEST = 136, 26, 1600
"""Widths in pixels of the margins of a drawing, of an average operation, and of the widest drawing."""
_UNKNOWN = 1e-6
"""Cost in milliseconds of an F, B or W that was neither measured nor profiled; costs must be above zero."""
_STYLE = "svg { max-width: 100%; height: auto; }\n"


def in_memory_unit(costs: StageCosts, unit: float) -> StageCosts:
    """Return `costs` with all amounts of memory divided by `unit`."""
    names = (field.name for field in fields(costs) if field.name.startswith("memory_"))
    return replace(costs, **{name: tuple(value / unit for value in getattr(costs, name)) for name in names})


def write_timeline(folder: Path, name: str, measured: Timeline, memory_unit: str) -> None:
    """Draw the timeline `measured`, and a simulation of its schedule with the same costs, in files `folder/name.*`.

    The SVG drawings of the measurement and of the simulation have the same time scale. `folder` is created if it is
    missing. `memory_unit` is the unit of memory in the costs, such as MiB.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planned = simulate(measured.schedule, measured.costs, lengths=measured.lengths)
    duration = float(max(measured.makespan, planned.makespan))
    width = min(_MARGINS + _OP_WIDTH * max(len(lane) for lane in measured.lanes), _WIDEST)
    schedule = measured.schedule.name
    subject = schedule if name == schedule else f"{name}: {schedule}"
    svgs = []
    for kind, timeline, how in (
        ("measured", measured, "as it ran"),
        ("planned", planned, "as it would run with the times measured there"),
    ):
        title = f"{subject} {how}"
        svgs.append(to_svg(timeline, title=title, memory_unit=memory_unit, width=width, duration=duration))
        write_file(folder / f"{name}.{kind}.svg", svgs[-1])
        write_file(folder / f"{name}.{kind}.html", to_html(timeline, title=title, memory_unit=memory_unit))
    write_file(folder / f"{name}.trace.json", to_chrome_trace(measured))
    body = f"{''.join(svgs)}<h2>Idle time by cause (ms)</h2><pre>{idle_table(measured)}</pre>\n"
    write_file(folder / f"{name}.html", html_document(name, body, _STYLE))


def measured_timeline(
    schedule: Schedule,
    lanes: Sequence[Sequence[TimedOp]],
    profiled: StageCosts | None,
    *,
    shapes_vary: bool = False,
) -> Timeline:
    """A `Timeline` of a step's measured operations, shifted to begin at time 0; its costs are mean times of operations.

    If a forward ran again after the rollback of an optimizer step, the timeline shows only the last run of the forward.
    The costs of messages and memory come from `profiled`; without `profiled`, these costs are zero. If `shapes_vary` is
    set, the timeline also contains the relative length of each microbatch, unless the schedule has copies to the host
    or pairs, which are not simulated together with lengths.
    """
    lanes = [_last_runs(lane) for lane in lanes]
    begin = min(lane[0].start for lane in lanes if lane)
    moved = tuple(tuple(TimedOp(op, start - begin, end - begin) for op, start, end in lane) for lane in lanes)
    # The measured times are times of stages that restore their layers in groups.
    grouped = None if profiled is None else in_groups(profiled, schedule.groups)
    ran = replace(schedule, ops=tuple(tuple(timed.op for timed in lane) for lane in moved), groups=())
    costs = _costs_of(ran, moved, grouped)
    has_lengths = shapes_vary and simulates_lengths(ran)
    return Timeline(ran, costs, True, moved, lengths=_lengths_of(ran, moved) if has_lengths else ())


def _lengths_of(schedule: Schedule, lanes: Sequence[Sequence[TimedOp]]) -> tuple[float, ...]:
    """The computing time of every microbatch divided by the mean computing time of a microbatch."""
    times = [0.0] * schedule.num_microbatches
    for op, start, end in chain.from_iterable(lanes):
        if op.kind not in POST_VALIDATION:
            times[op.microbatch] += end - start
    mean = statistics.fmean(times)
    return tuple(time / mean for time in times)


def _last_runs(lane: Sequence[TimedOp]) -> list[TimedOp]:
    last = {timed.op: timed for timed in lane}
    return [timed for timed in lane if last[timed.op] is timed]


def _costs_of(schedule: Schedule, lanes: Sequence[Sequence[TimedOp]], profiled: StageCosts | None) -> StageCosts:
    """Costs with the mean times of the operations that did not run in a pair of a forward and a backward.

    If a stage ran its F, B or W only in pairs, the time of `profiled` remains. Without `profiled`, the F and the
    backward of a pair count half of the pair's time each.
    """
    placement = schedule.placement
    samples: dict[tuple[OpKind, int], list[float]] = defaultdict(list)
    halves: dict[tuple[OpKind, int], list[float]] = defaultdict(list)
    for rank, lane in enumerate(lanes):
        times = {op: end - start for op, start, end in lane}
        for pair in pairs([timed.op for timed in lane]):
            half = sum(map(times.pop, pair)) / 2
            for op in pair:
                halves[op.kind, placement.stage_of(rank, op.chunk)].append(half)
        for op, time in times.items():
            samples[op.kind, placement.stage_of(rank, op.chunk)].append(time)
    if profiled is None:
        for key, values in halves.items():
            samples.setdefault(key, values)
        profiled = StageCosts.uniform(
            placement.num_stages, _UNKNOWN, _UNKNOWN, _UNKNOWN, memory_f=0, memory_b=0, memory_w=0
        )
    means: list[dict[OpKind, float]] = [{} for _ in range(placement.num_stages)]
    for (kind, stage), values in samples.items():
        means[stage][kind] = statistics.fmean(values)
    return _with_means(profiled, means)


def _with_means(costs: StageCosts, means: Sequence[Mapping[OpKind, float]]) -> StageCosts:
    """Replace each stage's times by the `means` of the measured kinds of operations; other times do not change."""
    stages = [by_result(mean) for mean in means]
    times = {
        name: tuple(
            stage.get(kind, 0.0 if name in OPTIONAL else known)
            for stage, known in zip(stages, getattr(costs, name), strict=True)
        )
        for name, kind in TIMES.items()
    }
    saved = (
        fused_saving(mean[OpKind.BW], b, w) if OpKind.BW in mean else min(known, w / 2)
        for mean, b, w, known in zip(means, times["time_b"], times["time_w"], costs.saved_bw, strict=True)
    )
    return replace(costs, **times, **costs.exchanges_within(times), saved_bw=tuple(saved))


def idle_table(timeline: Timeline) -> str:
    """Text of a table with every rank's idle time by cause, in milliseconds."""
    idle = causes(timeline)
    del idle["communication"]  # in a measured timeline communication is part of the waiting
    widths = [max(len(word), 10) for word in idle]
    lines = ["rank " + " ".join(map(str.rjust, idle, widths))]
    for rank, times in enumerate(zip(*idle.values(), strict=True)):
        lines.append(f"{rank:4d} " + " ".join(f"{time:{width}.2f}" for time, width in zip(times, widths, strict=True)))
    return "\n".join(lines)
