"""A timeline as SVG: a row for each rank, and below the rows the number of idle ranks and the memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.zero_bubble.schedule.analysis import Steps, idle_ranks_over_time, memory_over_time
from megatron.zero_bubble.schedule.draw import canvas, palette
from megatron.zero_bubble.schedule.draw.canvas import STRONG, figure, line, number, rect, text
from megatron.zero_bubble.schedule.draw.drawing import CURVE_HEIGHT, LEFT, TOP, Drawing, Options, drawing
from megatron.zero_bubble.schedule.draw.lanes import lanes, style
from megatron.zero_bubble.schedule.timeline import Timeline

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SWATCHES = 8
"""Largest number of ranks that the legend of the memory curves shows."""


def to_svg(timeline: Timeline, **options: Unpack[Options]) -> str:
    """Draw a timeline as SVG, in which hovering over an operation shows its stage, times, memory and messages.

    Args:
        timeline: timeline to draw.
        options: see `Options`.
    """
    return svg_of(drawing(timeline, **options))


def svg_of(picture: Drawing) -> str:
    """Write a drawing as SVG."""
    elements = [*_header(picture), *_grid(picture), *lanes(picture), *_idle_curve(picture)]
    if picture.has_memory:
        elements += _memory_curve(picture)
    return canvas.document(picture.width, picture.height, elements, style(picture))


def _header(picture: Drawing) -> Iterator[str]:
    yield text(12, 24, picture.title, size=17)
    yield text(12, 44, _figures(picture))
    for x, colours, words in picture.legend[:-1]:
        for k, colour in enumerate(colours):
            yield rect(x + 14 * k, 53, 12, 12, colour)
        yield text(x + 14 * len(colours) + 2, 63, words, size=11)
    x, _, words = picture.legend[-1]
    yield f'<path d="M{number(x)} 59h16" stroke="{STRONG}" stroke-width="1.5" fill="none"/>'
    yield text(x + 21, 63, words, size=11)
    yield text(picture.right + 8, TOP - 6, "bubble", size=11)


def _figures(picture: Drawing) -> str:
    """The text below the title of a drawing: number of ranks and of microbatches, idle time, span, and peak memory."""
    timeline, unit = picture.timeline, picture.time_unit
    iterations = f", {picture.steps} iterations" if picture.steps > 1 else ""
    words = f"{picture.num_lanes} ranks, {picture.num_microbatches} microbatches{iterations}: "
    words += f"{timeline.idle}, longest span {figure(timeline.cost)} {unit}"
    if timeline.makespan > timeline.cost * (1 + 1e-6):
        words += f", from first to last {figure(timeline.makespan)} {unit}"
    if picture.has_memory:
        words += f", peak memory {figure(max(timeline.peak_memory))} {picture.memory_unit}"
    return words


def _grid(picture: Drawing) -> Iterator[str]:
    """Yield the vertical grid lines of the plots below the rows of ranks, and a time label for each line."""
    bottom = picture.curve_top(picture.has_memory) + CURVE_HEIGHT
    for time in canvas.ticks(picture.duration, max(4, int(picture.width / 120))):
        x = picture.x(picture.start + time)
        yield line(x, picture.lanes_bottom, x, bottom)
        yield text(x, picture.lanes_bottom + 14, figure(time), size=10, anchor="middle")
    yield text(LEFT - 12, picture.lanes_bottom + 14, f"time ({picture.time_unit})", size=10, anchor="end")


def _curve_frame(picture: Drawing, k: int, name: str, largest: float) -> Iterator[str]:
    top = picture.curve_top(k)
    yield text(LEFT, top - 8, name, size=11)
    for value in canvas.ticks(largest, 3):
        y = top + CURVE_HEIGHT * (1 - value / largest)
        yield line(LEFT, y, picture.right, y)
        yield text(LEFT - 8, y + 4, figure(value), size=10, anchor="end")


def _points(picture: Drawing, k: int, steps: Steps, largest: float) -> list[tuple[float, float]]:
    """The coordinates, in pixels, of the corners in the plot of a step function."""
    points: list[tuple[float, float]] = []
    for time, value in steps:
        x = picture.x(max(time, picture.start))
        y = picture.curve_top(k) + CURVE_HEIGHT * (1 - float(value) / largest)
        if points:
            points.append((x, points[-1][1]))
        points.append((x, y))
    return points


def _idle_curve(picture: Drawing) -> Iterator[str]:
    yield from _curve_frame(picture, 0, f"idle ranks (of {picture.num_lanes})", picture.num_lanes)
    points = _points(picture, 0, idle_ranks_over_time(picture.timeline), picture.num_lanes)
    if points:
        bottom = picture.curve_top(0) + CURVE_HEIGHT
        area = canvas.corners([(points[0][0], bottom), *points, (points[-1][0], bottom)])
        yield f'<path d="{area}Z" fill="#d55e00" fill-opacity="0.55"/>'


def _memory_curve(picture: Drawing) -> Iterator[str]:
    peaks, name = picture.timeline.peak_memory, f"memory held by each rank ({picture.memory_unit})"
    largest = float(max(peaks))
    yield from _curve_frame(picture, 1, name, largest)
    x, y = LEFT + 18 + 5.6 * len(name), picture.curve_top(1) - 8
    shown = range(0, picture.num_lanes, -(-picture.num_lanes // _SWATCHES))
    for rank in shown:
        yield rect(x, y - 8, 9, 9, palette.colour_of_rank(rank, picture.num_lanes))
        yield text(x + 12, y, str(rank), size=10, fill=palette.colour_of_rank(rank, picture.num_lanes))
        x += 18 + 6 * len(str(rank))
    for rank in reversed(range(picture.num_lanes)):
        points = _points(picture, 1, memory_over_time(picture.timeline, rank), largest)
        title = f"memory of rank {rank}: at most {figure(peaks[rank])} {picture.memory_unit}"
        yield canvas.path(points, palette.colour_of_rank(rank, picture.num_lanes), title, width=1.4)
