"""Draws what ranks did (`--zero-bubble-timeline`), and what they will do (a plan in TensorBoard and W&B)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.runtime.replanner import Report
from megatron.zero_bubble.schedule import OpKind, Schedule, StageCosts, TimedOp, Timeline, simulate
from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.costs import OPTIONAL, by_result
from megatron.zero_bubble.schedule.draw import html_document, to_chrome_trace, to_html, to_svg
from megatron.zero_bubble.schedule.draw.palette import fill_of, is_dark
from megatron.zero_bubble.schedule.kinds import TIMES
from megatron.zero_bubble.session.files import write_file

_MARGINS, _OP_WIDTH, _WIDEST = 136, 26, 1600
"""Width in pixels of a drawing's margins, of an operation on average (most labels fit), and of the widest drawing."""
_UNKNOWN = 1e-6
"""Cost in milliseconds of an F, B or W that did not run, because it must be above zero."""
_STYLE = "svg { max-width: 100%; height: auto; }\n"


def write_timeline(folder: Path, name: str, measured: Timeline, memory_unit: str) -> None:
    """Write `measured`, and the simulation of its schedule with its costs, to files `folder/name.*`.

    Both drawings have the same time scale. `folder` is created if it is missing. `memory_unit` is the unit of memory
    in the costs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planned = simulate(measured.schedule, measured.costs, lengths=measured.lengths)
    duration = float(max(measured.makespan, planned.makespan))
    width = min(_MARGINS + _OP_WIDTH * max(len(lane) for lane in measured.lanes), _WIDEST)
    schedule = measured.schedule.name
    subject = schedule if name == schedule else f"{name}: {schedule}"
    titles = {
        "measured": f"{subject} as it ran",
        "planned": f"{subject} as it would run with the times measured there",
    }
    svgs = []
    for kind, timeline in (("measured", measured), ("planned", planned)):
        svg = to_svg(timeline, title=titles[kind], memory_unit=memory_unit, width=width, duration=duration)
        svgs.append(svg)
        write_file(folder / f"{name}.{kind}.svg", svg)
        write_file(folder / f"{name}.{kind}.html", to_html(timeline, title=titles[kind], memory_unit=memory_unit))
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
    """The measured operations as a `Timeline`, from time 0, with this step's mean times as its costs.

    Forwards that were run again, after a step was amended, appear only where they ran last.
    The costs of messages and memory come from `profiled`; without it they are zero. If shapes vary, each microbatch has
    its own share of the times.
    """
    lanes = [_last_runs(lane) for lane in lanes]
    begin = min(lane[0].start for lane in lanes if lane)
    moved = tuple(tuple(TimedOp(op, start - begin, end - begin) for op, start, end in lane) for lane in lanes)
    ran = replace(schedule, ops=tuple(tuple(timed.op for timed in lane) for lane in moved))
    costs = _costs_of(ran, moved, profiled)
    return Timeline(ran, costs, True, moved, lengths=_lengths_of(ran, moved) if shapes_vary else ())


def _lengths_of(schedule: Schedule, lanes: Sequence[Sequence[TimedOp]]) -> tuple[float, ...]:
    """The time of every microbatch over that of the mean one."""
    times = [0.0] * schedule.num_microbatches
    for op, start, end in chain.from_iterable(lanes):
        times[op.microbatch] += end - start
    mean = statistics.fmean(times)
    return tuple(time / mean for time in times)


def _last_runs(lane: Sequence[TimedOp]) -> list[TimedOp]:
    last = {timed.op: timed for timed in lane}
    return [timed for timed in lane if last[timed.op] is timed]


def _costs_of(schedule: Schedule, lanes: Sequence[Sequence[TimedOp]], profiled: StageCosts | None) -> StageCosts:
    placement = schedule.placement
    samples: dict[tuple[OpKind, int], list[float]] = {}
    for rank, lane in enumerate(lanes):
        for op, start, end in lane:
            samples.setdefault((op.kind, placement.stage_of(rank, op.chunk)), []).append(end - start)
    means: list[dict[OpKind, float]] = [{} for _ in range(placement.num_stages)]
    for (kind, stage), values in samples.items():
        means[stage][kind] = statistics.fmean(values)
    stages = [by_result(mean) for mean in means]
    times = {
        name: tuple(stage.get(kind, 0.0 if name in OPTIONAL else _UNKNOWN) for stage in stages)
        for name, kind in TIMES.items()
    }
    free = StageCosts.uniform(placement.num_stages, memory_f=0, memory_b=0, memory_w=0)
    return replace(profiled or free, **times)


def idle_table(timeline: Timeline) -> str:
    """The idle time of every rank by cause, in milliseconds."""
    idle = causes(timeline)
    del idle["communication"]  # in a measured timeline communication is part of the waiting
    widths = [max(len(word), 10) for word in idle]
    lines = ["rank " + " ".join(word.rjust(width) for word, width in zip(idle, widths, strict=True))]
    for rank, times in enumerate(zip(*idle.values(), strict=True)):
        lines.append(f"{rank:4d} " + " ".join(f"{time:{width}.2f}" for time, width in zip(times, widths, strict=True)))
    return "\n".join(lines)


_CLOCK_ROUNDS = 9


class TimelineWriter:
    """Records the operations of some iterations; global rank 0 writes those of its pipeline's ranks.

    Args:
        folder: the folder for the files, which is created if it is missing.
        first, last: the first and the last iteration to write.
        start: the iteration after which the job started; the observer counts from there.
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
        """Write the iteration if it is one of those to draw; a collective call of the pipeline of rank 0."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if iteration - self._start not in self._steps or 0 not in dist.get_process_group_ranks(group):
            return
        self._source.observer.flush()
        if self._offset is None:
            self._offset = clock_offset(group) - self._source.observer.lag()
        lane = [TimedOp(m.op, (m.start - self._offset) * 1000.0, (m.end - self._offset) * 1000.0) for m in self._ops]
        lanes: list[list[TimedOp]] = [[] for _ in range(group.size())]
        dist.all_gather_object(lanes, lane, group=group)
        if dist.get_rank() == 0:
            schedule = self._source.schedule(num_microbatches).without_communication()
            profile = self._source.profile
            costs = _in_mebibytes(profile.costs) if profile else None
            timeline = measured_timeline(schedule, lanes, costs, shapes_vary=self._source.shapes_vary)
            write_timeline(self._folder, f"iteration_{iteration:07d}", timeline, "MiB")


def _in_mebibytes(costs: StageCosts) -> StageCosts:
    names = [field.name for field in fields(costs) if field.name.startswith("memory")]
    return replace(costs, **{name: tuple(value / 2**20 for value in getattr(costs, name)) for name in names})


def clock_offset(group: dist.ProcessGroup) -> float:
    """Seconds by which this rank's clock is ahead of the clock of the group's first rank; a collective call.

    Ranks leave a barrier at nearly the same moment. The offset is the median over several barriers of the difference
    between the clocks at that moment. Its error is the time of a barrier, some tens of microseconds on one host.
    """
    differences = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier(group=group)
        now = time.perf_counter()
        clocks: list[float] = [0.0] * group.size()
        dist.all_gather_object(clocks, now, group=group)
        differences.append(now - clocks[0])
    return statistics.median(differences)


_PICTURE = "zero-bubble/schedule"
_WIDTH, _LANE, _MARGIN = 1600, 28, 60
"""Width of a picture, height of a rank's lane and width of the ranks' names, in pixels."""


def write_plan(report: Report, iteration: int, tensorboard: Any | None, wandb_run: Any | None) -> None:
    """Write what is known of the plan of a `report` that was made after `iteration`.

    Args:
        tensorboard: a `SummaryWriter`, or None.
        wandb_run: a run of Weights & Biases or its module, or None.
    """
    if tensorboard is None and wandb_run is None:
        return
    timeline = report.prediction.timeline
    scalars = cause_scalars(timeline)
    if tensorboard is not None:
        for tag, value in scalars.items():
            tensorboard.add_scalar(tag, value, iteration)
        tensorboard.add_image(_PICTURE, plan_picture(timeline), iteration, dataformats="HWC")
    if wandb_run is not None:
        import wandb

        title = f"{timeline.schedule.name}, planned after iteration {iteration}"
        picture = wandb.Html(to_svg(timeline, title=title, width=_WIDTH), inject=False)
        wandb_run.log({**scalars, _PICTURE: picture}, step=iteration)


def cause_scalars(timeline: Timeline) -> dict[str, float]:
    """The share of all ranks' time that is lost to each cause, under its tag."""
    whole = float(timeline.cost) * len(timeline.lanes)
    return {
        f"predicted-idle/{cause.replace(' ', '-')}": float(sum(times)) / whole
        for cause, times in causes(timeline).items()
    }


def plan_picture(timeline: Timeline) -> np.ndarray:
    """A picture [height, width, 3] of the operations of every rank over time, numbered by their microbatches."""
    from PIL import Image, ImageDraw  # a dependency of TensorBoard

    schedule = timeline.schedule
    image = Image.new("RGB", (_WIDTH, _LANE * len(timeline.lanes)), "#ffffff")
    pen = ImageDraw.Draw(image)
    scale = (_WIDTH - _MARGIN) / float(timeline.makespan or 1)
    for rank, lane in enumerate(timeline.lanes):
        top, bottom = rank * _LANE + 2, (rank + 1) * _LANE - 2
        pen.text((4, top + 6), f"rank {rank}", fill="#000000")
        for op, start, end in lane:
            left, right = (_MARGIN + float(time) * scale for time in (start, end))
            colour = fill_of(op.kind, op.chunk, schedule.placement.num_chunks)
            pen.rectangle((left, top, right, bottom), fill=colour, outline="#ffffff")
            number = str(op.microbatch)
            if pen.textlength(number) < right - left - 2:
                ink = "#ffffff" if is_dark(colour) else "#000000"
                pen.text(((left + right) / 2, (top + bottom) / 2), number, fill=ink, anchor="mm")
    return np.asarray(image)
