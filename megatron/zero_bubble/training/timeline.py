"""`--zero-bubble-timeline`: what every rank of one pipeline really did, drawn beside what was planned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.runtime.timeline import MeasuredOp
from megatron.zero_bubble.schedule import OpKind, Schedule, StageCosts, TimedOp, Timeline, simulate
from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.draw import to_chrome_trace, to_html, to_svg
from megatron.zero_bubble.schedule.ir import SPLIT_WEIGHT_GRADIENTS
from megatron.zero_bubble.schedule.serialize import Profile
from megatron.zero_bubble.schedules import ForwardBackward

_CLOCK_ROUNDS = 9
_UNIT = "MiB"


class TimelineWriter:
    """Collects the operations of some iterations and writes them, on global rank 0, for its pipeline.

    Args:
        folder: is made if it is not there.
        first, last: the iterations, inclusive.
        start: the iteration that the job started after; the observer counts from there.
    """

    def __init__(self, folder: str, first: int, last: int, start: int, forward_backward: ForwardBackward) -> None:
        self._folder = Path(folder)
        self._steps = range(first - start, last - start + 1)
        self._start = start
        self._source = forward_backward
        self._ops: Sequence[MeasuredOp] = ()
        self._offset: float | None = None
        forward_backward.observer.sinks.append(self._collect)

    def _collect(self, step: int, ops: Sequence[MeasuredOp]) -> None:
        if step in self._steps:
            self._ops = ops

    def after_iteration(self, iteration: int, num_microbatches: int) -> None:
        """A collective call of the pipeline of rank 0, in the iterations that are drawn."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if iteration - self._start not in self._steps or 0 not in dist.get_process_group_ranks(group):
            return
        self._source.observer.flush()
        if self._offset is None:
            self._offset = clock_offset(group)
        lane = [TimedOp(m.op, (m.start - self._offset) * 1000.0, (m.end - self._offset) * 1000.0) for m in self._ops]
        lanes: list[list[TimedOp]] = [[] for _ in range(group.size())]
        dist.all_gather_object(lanes, lane, group=group)
        if dist.get_rank() == 0:
            schedule = self._source.schedule(num_microbatches).without_communication()
            self._write(iteration, measured_timeline(schedule, lanes, self._source.profile))

    def _write(self, iteration: int, measured: Timeline) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        planned = simulate(measured.schedule, measured.costs)
        name = f"iteration_{iteration:07d}"
        titles = {
            "measured": f"{measured.schedule.name}, iteration {iteration}, as it ran",
            "planned": f"{measured.schedule.name}, as it would run with the times of this iteration",
        }
        svgs = []
        for kind, timeline in (("measured", measured), ("planned", planned)):
            svg = to_svg(timeline, title=titles[kind], memory_unit=_UNIT)
            svgs.append(svg)
            (self._folder / f"{name}.{kind}.svg").write_text(svg)
            (self._folder / f"{name}.{kind}.html").write_text(to_html(timeline, title=titles[kind], memory_unit=_UNIT))
        (self._folder / f"{name}.trace.json").write_text(to_chrome_trace(measured))
        (self._folder / f"{name}.html").write_text(
            _PAGE.format(name=name, idle=idle_table(measured), svgs="".join(svgs))
        )


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title>
<style>body {{ font: 14px sans-serif; margin: 1em; }} svg {{ max-width: 100%; height: auto; }}</style></head>
<body>{svgs}<h2>Idle time by cause (ms)</h2><pre>{idle}</pre></body></html>
"""


def measured_timeline(schedule: Schedule, lanes: Sequence[Sequence[TimedOp]], profile: Profile | None) -> Timeline:
    """The measured operations as a `Timeline`, from time 0, with this step's mean times as its costs."""
    begin = min(lane[0].start for lane in lanes if lane)
    moved = tuple(tuple(TimedOp(op, start - begin, end - begin) for op, start, end in lane) for lane in lanes)
    return Timeline(schedule, _costs_of(schedule, moved, profile), True, moved)


def _costs_of(schedule: Schedule, lanes: Sequence[Sequence[TimedOp]], profile: Profile | None) -> StageCosts:
    placement = schedule.placement
    samples: dict[tuple[OpKind, int], list[float]] = {}
    for rank, lane in enumerate(lanes):
        for op, start, end in lane:
            kind = OpKind.W if op.kind in SPLIT_WEIGHT_GRADIENTS else op.kind
            samples.setdefault((kind, placement.stage_of(rank, op.chunk)), []).append(end - start)

    def mean(kind: OpKind, share: float) -> tuple[float, ...]:
        """A fused backward is counted as half B and half W."""
        times = []
        for stage in range(placement.num_stages):
            values = samples.get((kind, stage)) or [share * v for v in samples.get((OpKind.BW, stage), [1e-6])]
            times.append(statistics.fmean(values))
        return tuple(times)

    count = placement.num_stages
    f, b, w = mean(OpKind.F, 1.0), mean(OpKind.B, 0.5), mean(OpKind.W, 0.5)
    if profile is None:
        nothing = (0.0,) * count
        return StageCosts(f, b, w, nothing[1:], nothing, nothing, nothing)
    mib = {
        name: tuple(value / 2**20 for value in getattr(profile.costs, name))
        for name in ("memory_f", "memory_b", "memory_w")
    }
    return replace(profile.costs, time_f=f, time_b=b, time_w=w, **mib)


def idle_table(timeline: Timeline) -> str:
    """The idle time of every rank by cause, in milliseconds."""
    idle = causes(timeline)
    del idle["communication"]  # measured, it is part of the waiting
    widths = [max(len(word), 10) for word in idle]
    lines = ["rank " + " ".join(word.rjust(width) for word, width in zip(idle, widths, strict=True))]
    for rank, times in enumerate(zip(*idle.values(), strict=True)):
        lines.append(f"{rank:4d} " + " ".join(f"{time:{width}.2f}" for time, width in zip(times, widths, strict=True)))
    return "\n".join(lines)


def clock_offset(group: dist.ProcessGroup) -> float:
    """Seconds by which this rank's clock is ahead of the first one's of the group; a collective call.

    Ranks leave a barrier at nearly the same moment: the median over several of the difference between
    what the clocks show then. Good to the time of a barrier, some tens of microseconds on one host.
    """
    differences = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier(group=group)
        now = time.perf_counter()
        clocks: list[float] = [0.0] * group.size()
        dist.all_gather_object(clocks, now, group=group)
        differences.append(now - clocks[0])
    return statistics.median(differences)
