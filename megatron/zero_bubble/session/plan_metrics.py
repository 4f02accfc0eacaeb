"""Writes a plan to TensorBoard and Weights & Biases: predicted idle time by its causes, and the schedule's picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.zero_bubble.runtime.replanner import Report
from megatron.zero_bubble.schedule import Timeline
from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.draw import to_svg
from megatron.zero_bubble.schedule.draw.palette import fill_of, is_dark

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
