"""A timeline as SVG: a lane a rank, and below them the idle ranks and the memory over time."""

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
"""Colours of ranks that are shown beside the memory at most."""


def to_svg(timeline: Timeline, **options: Unpack[Options]) -> str:
    """The drawing as text. Hovering over an operation shows its stage, times, memory and messages, by CSS alone."""
    return svg_of(drawing(timeline, **options))


def svg_of(what: Drawing) -> str:
    """The drawing as text."""
    elements = [*_header(what), *_grid(what), *lanes(what), *_idle_curve(what)]
    if what.has_memory:
        elements += _memory_curve(what)
    return canvas.document(what.width, what.height, elements, style(what))


def _header(what: Drawing) -> Iterator[str]:
    yield text(12, 24, what.title, size=17)
    yield text(12, 44, _figures(what))
    for x, colours, words in what.legend[:-1]:
        for k, colour in enumerate(colours):
            yield rect(x + 14 * k, 53, 12, 12, colour)
        yield text(x + 14 * len(colours) + 2, 63, words, size=11)
    x, _, words = what.legend[-1]
    yield f'<path d="M{number(x)} 59h16" stroke="{STRONG}" stroke-width="1.5" fill="none"/>'
    yield text(x + 21, 63, words, size=11)
    yield text(what.right + 8, TOP - 6, "bubble", size=11)


def _figures(what: Drawing) -> str:
    """The line below the title."""
    timeline, unit = what.timeline, what.time_unit
    iterations = f", {what.steps} iterations" if what.steps > 1 else ""
    words = f"{what.num_lanes} ranks, {what.num_microbatches} microbatches{iterations}: "
    words += f"{timeline.idle}, longest span {figure(timeline.cost)} {unit}"
    if timeline.makespan > timeline.cost * (1 + 1e-6):
        words += f", from first to last {figure(timeline.makespan)} {unit}"
    if what.has_memory:
        words += f", peak memory {figure(max(timeline.peak_memory))} {what.memory_unit}"
    return words


def _grid(what: Drawing) -> Iterator[str]:
    """Vertical lines through lanes and curves, with the time below the lanes."""
    bottom = what.curve_top(what.num_curves - 1) + CURVE_HEIGHT
    for time in canvas.ticks(what.duration, max(4, int(what.width / 120))):
        x = what.x(what.begin + time)
        yield line(x, what.lanes_bottom, x, bottom)
        yield text(x, what.lanes_bottom + 14, figure(time), size=10, anchor="middle")
    yield text(LEFT - 12, what.lanes_bottom + 14, f"time ({what.time_unit})", size=10, anchor="end")


def _curve_frame(what: Drawing, k: int, name: str, largest: float) -> Iterator[str]:
    top = what.curve_top(k)
    yield text(LEFT, top - 8, name, size=11)
    for value in canvas.ticks(largest, 3):
        y = top + CURVE_HEIGHT * (1 - value / largest)
        yield line(LEFT, y, what.right, y)
        yield text(LEFT - 8, y + 4, figure(value), size=10, anchor="end")


def _points(what: Drawing, k: int, steps: Steps, largest: float) -> list[tuple[float, float]]:
    """The corners of a curve of steps, in pixels."""
    points: list[tuple[float, float]] = []
    for time, value in steps:
        x = what.x(max(time, what.begin))
        y = what.curve_top(k) + CURVE_HEIGHT * (1 - float(value) / largest)
        if points:
            points.append((x, points[-1][1]))
        points.append((x, y))
    return points


def _idle_curve(what: Drawing) -> Iterator[str]:
    yield from _curve_frame(what, 0, f"idle ranks (of {what.num_lanes})", what.num_lanes)
    points = _points(what, 0, idle_ranks_over_time(what.timeline), what.num_lanes)
    if points:
        bottom = what.curve_top(0) + CURVE_HEIGHT
        area = canvas.corners([(points[0][0], bottom), *points, (points[-1][0], bottom)])
        yield f'<path d="{area}Z" fill="#d55e00" fill-opacity="0.55"/>'


def _memory_curve(what: Drawing) -> Iterator[str]:
    peaks, name = what.timeline.peak_memory, f"memory held by each rank ({what.memory_unit})"
    largest = float(max(peaks))
    yield from _curve_frame(what, 1, name, largest)
    x, y = LEFT + 18 + 5.6 * len(name), what.curve_top(1) - 8
    shown = range(0, what.num_lanes, -(-what.num_lanes // _SWATCHES))
    for rank in shown:
        yield rect(x, y - 8, 9, 9, palette.colour_of_rank(rank, what.num_lanes))
        yield text(x + 12, y, str(rank), size=10, fill=palette.colour_of_rank(rank, what.num_lanes))
        x += 18 + 6 * len(str(rank))
    for rank in reversed(range(what.num_lanes)):
        points = _points(what, 1, memory_over_time(what.timeline, rank), largest)
        title = f"memory of rank {rank}: at most {figure(peaks[rank])} {what.memory_unit}"
        yield canvas.path(points, palette.colour_of_rank(rank, what.num_lanes), title, width=1.4)
