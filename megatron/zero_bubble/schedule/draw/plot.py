"""Line plots as SVG, such as a plot of the bubble rate against the memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.zero_bubble.schedule.draw import canvas, palette
from megatron.zero_bubble.schedule.draw.canvas import clean, figure, line, number, rect, text

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 180, 44, 52
_WIDTH, _HEIGHT = 900, 440


class Series(NamedTuple):
    """One line of a plot: its name and its points (x, y). A single point is drawn as a mark."""

    name: str
    points: tuple[tuple[float, float], ...]


def to_plot(series: Sequence[Series], *, title: str, x_label: str, y_label: str, y_from: float = 0) -> str:
    """Draw lines as an SVG plot.

    Args:
        series: lines, each with at least one point.
        title: title of the plot.
        x_label: label of the x axis, which starts at 0.
        y_label: label of the y axis.
        y_from: lowest value on the y axis; if a point is lower, the y axis starts at the lowest point.
    """
    largest_x = max((float(x) for curve in series for x, _ in curve.points), default=1.0) or 1.0
    least_y = min((float(y) for curve in series for _, y in curve.points), default=y_from)
    y_from = min(y_from, least_y)
    largest_y = y_from + (max((float(y) for curve in series for _, y in curve.points), default=1.0) - y_from) * 1.05
    largest_y = largest_y if largest_y > y_from else y_from + 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + float(x) / largest_x * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (float(y) - y_from) / (largest_y - y_from) * (_HEIGHT - _TOP - _BOTTOM),
        )

    elements = [text(_LEFT, 24, title, size=15)]
    for x in canvas.ticks(largest_x, 8):
        elements += [
            line(*at(x, y_from), *at(x, largest_y)),
            text(at(x, y_from)[0], at(x, y_from)[1] + 16, figure(x), 11, "middle"),
        ]
    for y in (y_from + y for y in canvas.ticks(largest_y - y_from, 6)):
        elements += [line(*at(0, y), *at(largest_x, y)), text(_LEFT - 8, at(0, y)[1] + 4, figure(y), 11, "end")]
    elements.append(text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, x_label, anchor="middle"))
    elements.append(
        f'<g transform="translate(16 {_HEIGHT / 2}) rotate(-90)">{text(0, 0, y_label, anchor="middle")}</g>'
    )
    for k, curve in enumerate(series):
        elements += _draw(k, curve, [at(x, y) for x, y in curve.points])
    return canvas.document(_WIDTH, _HEIGHT, elements)


def _draw(k: int, series: Series, points: list[tuple[float, float]]) -> Iterator[str]:
    colour = palette.SERIES[k % len(palette.SERIES)]
    if len(points) > 1:
        yield canvas.path(points, colour, series.name, width=2)
    for (x, y), (value_x, value_y) in zip(points, series.points, strict=True):
        tip = f"{series.name}: {figure(value_y)} at {figure(value_x)}"
        yield f'<circle cx="{number(x)}" cy="{number(y)}" r="3.5" fill="{colour}"><title>{clean(tip)}</title></circle>'
    y = _TOP + 8 + 18 * k
    yield rect(_WIDTH - 160, y - 10, 12, 12, colour)
    yield text(_WIDTH - 142, y, series.name)
