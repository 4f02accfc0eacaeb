"""Draws an SVG timeline of replicas that compute and wait for each other, with a panel for each variant of SGD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.zero_bubble.schedule.draw import canvas, palette
from megatron.zero_bubble.schedule.draw.canvas import INK, LANE, figure, label, line, rect, text

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 64, 34
_WIDTH, _LANE, _GAP = 900, 22, 44
_COMPUTES, _STRAGGLES = palette.SERIES[5], palette.SERIES[1]
_LEGEND = {"computes": _COMPUTES, "straggles": _STRAGGLES, "waits": LANE}


class ReplicaStep(NamedTuple):
    """One step of a replica: computation from `start` to `end`, then a wait for the replica's group until `resumed`."""

    start: float
    end: float
    resumed: float
    group_size: int
    """Number of neighboring replicas that wait for each other after the step; 1 if the replica waits for no replica."""
    straggles: bool


def to_replica_lanes(panels: Mapping[str, Sequence[Sequence[ReplicaStep]]], *, title: str) -> str:
    """Return the text of an SVG file that shows the replicas' steps over time, with a row for each replica.

    Args:
        panels: the steps of each panel, by the panel's heading; a step is a list with one `ReplicaStep` for each
            replica.
    """
    end = max(step.resumed for steps in panels.values() for step in steps[-1])
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    elements = [text(_LEFT, 24, title, size=15)]
    for k, (words, colour) in enumerate(_LEGEND.items()):
        elements += [rect(_LEFT + 100 * k, 34, 12, 12, colour), text(_LEFT + 100 * k + 18, 44, words)]
    y = float(_TOP)
    for name, steps in panels.items():
        elements += _panel(name, steps, scale, y)
        y += len(steps[0]) * _LANE + _GAP
    for tick in canvas.ticks(end, 10):
        elements.append(text(_LEFT + tick * scale, y - _GAP + 34, figure(tick), 11, "middle"))
    return canvas.document(_WIDTH, y - _GAP + _BOTTOM + 14, elements)


def _panel(name: str, steps: Sequence[Sequence[ReplicaStep]], scale: float, top: float) -> Iterator[str]:
    end = max(step.resumed for step in steps[-1])
    yield text(_LEFT, top + 12, f"{name}: {len(steps)} steps end at {figure(end)}", size=13)
    for replica, own in enumerate(zip(*steps, strict=True)):
        y = top + 20 + replica * _LANE
        yield text(_LEFT - 8, y + 14, f"replica {replica}", 11, "end")
        yield rect(_LEFT, y + 1, own[-1].resumed * scale, _LANE - 2, LANE)
        for number, step in enumerate(own):
            width = (step.end - step.start) * scale
            colour = _STRAGGLES if step.straggles else _COMPUTES
            tip = f"step {number + 1} of replica {replica}: {figure(step.start)} to {figure(step.end)}"
            yield rect(_LEFT + step.start * scale + 0.5, y + 1, width - 1, _LANE - 2, colour, tip)
            yield label(_LEFT + (step.start + step.end) / 2 * scale, y + 15, f"{number + 1}", 11, "#111111")
    for each in steps:  # a line where the replicas of a group resume together
        size = each[0].group_size
        for first in range(0, len(each) if size > 1 else 0, size):
            x, y = _LEFT + each[first].resumed * scale, top + 20 + first * _LANE
            yield line(x, y, x, y + size * _LANE, INK)
