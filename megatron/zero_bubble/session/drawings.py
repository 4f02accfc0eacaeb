"""Draws the measured operations of ranks (`--zero-bubble-timeline`), and draws plans for TensorBoard and W&B."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import TimedOp, Timeline
from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.draw import to_svg
from megatron.zero_bubble.schedule.draw.palette import fill_of, is_dark
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.profiling import profile_window
from megatron.zero_bubble.session.reports import print_rank_0
from megatron.zero_bubble.session.start_up import writing
from megatron.zero_bubble.session.timeline_files import in_memory_unit, measured_timeline, write_timeline

_CLOCK_ROUNDS = 9


class TimelineWriter:
    """Records the operations of iterations `first` to `last`; global rank 0 draws the timeline of its own pipeline.

    Args:
        folder: the folder for the files, which is created if it is missing.
        first, last: the first and the last iteration to draw.
        start: number of iterations before this job; iteration `start` + 1 is the job's first step.
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
        # Steps are not compared with iterations, because Megatron-LM may skip an iteration.
        self._ops = ops

    def after_iteration(self, iteration: int, num_microbatches: int) -> None:
        """Draw the timeline if `first` <= `iteration` <= `last`; a collective call of global rank 0's pipeline.

        Raises:
            SessionError: on global rank 0, if the files cannot be written.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        if iteration - self._start not in self._steps or 0 not in dist.get_process_group_ranks(group):
            return
        self._source.observer.flush()
        if self._offset is None:
            self._offset = clock_offset(group) - self._source.observer.lag()
        lane = [TimedOp(m.op, (m.start - self._offset) * 1000.0, (m.end - self._offset) * 1000.0) for m in self._ops]
        lanes = from_all_ranks(lane, group)
        if dist.get_rank() == 0:
            schedule = self._source.running.schedule(num_microbatches).without_communication()
            profile = self._source.running.profile
            costs = None if profile is None else in_memory_unit(profile.costs, 2**20)
            timeline = measured_timeline(schedule, lanes, costs, shapes_vary=self._source.connections.shapes_vary)
            with writing("--zero-bubble-timeline", self._folder):
                write_timeline(self._folder, f"iteration_{iteration:07d}", timeline, "MiB")


def open_timeline(flags: JobFlags, forward_backward: ForwardBackward, iteration: int) -> TimelineWriter | None:
    """The `TimelineWriter` of a job that continues after `iteration`; None without `--zero-bubble-timeline`."""
    if flags.zero_bubble_timeline is None:
        return None
    window = None if flags.zero_bubble_profile_input is not None else profile_window(flags)
    after = iteration + (window[1] if window else 1)
    first, last = flags.zero_bubble_timeline_iters or (after + 1, after + 2)
    steps = flags.num_iterations(iteration)
    if flags.zero_bubble_timeline_iters and (last <= iteration or (steps is not None and first > iteration + steps)):
        end = "" if steps is None else f" to {iteration + steps}"
        print_rank_0(
            f" > --zero-bubble-timeline-iters {first} {last}: nothing is drawn, this job runs iterations "
            f"{iteration + 1}{end}"
        )
    return TimelineWriter(flags.zero_bubble_timeline, first, last, iteration, forward_backward)


def clock_offset(group: dist.ProcessGroup) -> float:
    """Seconds by which this rank's clock is ahead of the clock of the first rank in `group`; a collective call.

    The result is the median of several measurements. Each measurement follows a barrier, which all ranks leave at
    nearly the same moment.
    """
    differences = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier(group=group)
        now = time.perf_counter()
        differences.append(now - from_all_ranks(now, group)[0])
    return statistics.median(differences)


_PICTURE = "zero-bubble/schedule"
_WIDTH, _LANE, _MARGIN = 1600, 28, 60
"""Width of a picture, height of each rank's row, and width of the column of rank names, in pixels."""


def write_scalars(scalars: Mapping[str, float], iteration: int, tensorboard: Any | None, wandb_run: Any | None) -> None:
    """Write each value of `scalars` under its tag to TensorBoard and Weights & Biases.

    Args:
        tensorboard: a `SummaryWriter`, or None.
        wandb_run: either the module `wandb` or a run of Weights & Biases; None without Weights & Biases.
    """
    if tensorboard is not None:
        for tag, value in scalars.items():
            tensorboard.add_scalar(tag, value, iteration)
    if wandb_run is not None:
        wandb_run.log(dict(scalars), step=iteration)


def write_plan(report: Report, iteration: int, tensorboard: Any | None, wandb_run: Any | None) -> None:
    """Write a picture of the plan, and its idle time by cause, to TensorBoard and W&B as step `iteration`."""
    if tensorboard is None and wandb_run is None:
        return
    timeline = report.prediction.timeline
    write_scalars(cause_scalars(timeline), iteration, tensorboard, wandb_run)
    if tensorboard is not None:
        tensorboard.add_image(_PICTURE, plan_picture(timeline), iteration, dataformats="HWC")
    if wandb_run is not None:
        import wandb

        title = f"{timeline.schedule.name}, planned after iteration {iteration}"
        picture = wandb.Html(to_svg(timeline, title=title, width=_WIDTH), inject=False)
        wandb_run.log({_PICTURE: picture}, step=iteration)


def cause_scalars(timeline: Timeline) -> dict[str, float]:
    """Return TensorBoard tag of a cause -> idle time due to this cause, divided by (number of ranks x longest span)."""
    whole = float(timeline.cost) * len(timeline.lanes)
    return {
        f"predicted-idle/{cause.replace(' ', '-')}": float(sum(times)) / whole
        for cause, times in causes(timeline).items()
    }


def plan_picture(timeline: Timeline) -> np.ndarray:
    """An image array [height, width, 3] of every rank's operations over time, with their microbatch numbers."""
    from PIL import Image, ImageDraw  # TensorBoard needs this package for pictures, too

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
