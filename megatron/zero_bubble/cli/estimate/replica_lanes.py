"""Steps of replicas as SVG: a lane for each replica, one panel below the other on a common time axis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from megatron.zero_bubble.cli.estimate.stragglers import ReplicaStep
from megatron.zero_bubble.schedule.draw import canvas, palette
from megatron.zero_bubble.schedule.draw.canvas import INK, LANE, figure, label, line, rect, text

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 64, 34
_WIDTH, _LANE, _GAP = 900, 22, 44
_STEP, _SLOW = palette.SERIES[5], palette.SERIES[1]


def to_replica_lanes(
    panels: Mapping[str, Sequence[Sequence[ReplicaStep]]], slow: Collection[tuple[int, int]], *, title: str
) -> str:
    """The drawing as text.

    Args:
        panels: by name, for each step that of every replica.
        slow: the steps, each with its replica, in which a replica straggles.
    """
    end = max(step.resumed for steps in panels.values() for step in steps[-1])
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    elements = [text(_LEFT, 24, title, size=15), *_legend()]
    y = float(_TOP)
    for name, steps in panels.items():
        elements += _panel(name, steps, slow, scale, y)
        y += len(steps[0]) * _LANE + _GAP
    for tick in canvas.ticks(end, 10):
        elements.append(text(_LEFT + tick * scale, y - _GAP + 34, figure(tick), 11, "middle"))
    return canvas.document(_WIDTH, y - _GAP + _BOTTOM + 14, elements)


def _legend() -> Iterator[str]:
    for x, colour, words in (
        (_LEFT, _STEP, "computes"),
        (_LEFT + 100, _SLOW, "straggles"),
        (_LEFT + 200, LANE, "waits"),
    ):
        yield rect(x, 34, 12, 12, colour)
        yield text(x + 18, 44, words)


def _panel(
    name: str, steps: Sequence[Sequence[ReplicaStep]], slow: Collection[tuple[int, int]], scale: float, top: float
) -> Iterator[str]:
    replicas = range(len(steps[0]))
    end = max(step.resumed for step in steps[-1])
    yield text(_LEFT, top + 12, f"{name}: {len(steps)} steps end at {figure(end)}", size=13)
    for replica in replicas:
        y = top + 20 + replica * _LANE
        yield text(_LEFT - 8, y + 14, f"replica {replica}", 11, "end")
        yield rect(_LEFT, y + 1, steps[-1][replica].resumed * scale, _LANE - 2, LANE)
        for number, each in enumerate(steps):
            step = each[replica]
            colour = _SLOW if (number, replica) in slow else _STEP
            width = (step.end - step.start) * scale
            tip = f"step {number + 1} of replica {replica}: {figure(step.start)} to {figure(step.end)}"
            yield rect(_LEFT + step.start * scale + 0.5, y + 1, width - 1, _LANE - 2, colour, tip)
            yield label(_LEFT + (step.start + step.end) / 2 * scale, y + 15, f"{number + 1}", 11, "#111111")
    yield from _averagings(steps, scale, top + 20)


def _averagings(steps: Sequence[Sequence[ReplicaStep]], scale: float, top: float) -> Iterator[str]:
    """A line where the replicas of a group resume together."""
    for each in steps:
        size = each[0].group_size
        for first in range(0, len(each) if size > 1 else 0, size):
            x = _LEFT + each[first].resumed * scale
            yield line(x, top + first * _LANE, x, top + (first + size) * _LANE, INK)
