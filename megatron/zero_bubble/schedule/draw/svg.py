"""A timeline as SVG: a lane a rank, and below them the idle ranks and the memory over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.zero_bubble.schedule.draw import canvas, curves, palette
from megatron.zero_bubble.schedule.draw.canvas import INK, line, number, rect, text
from megatron.zero_bubble.schedule.ir import POST_VALIDATION
from megatron.zero_bubble.schedule.memory import memory_held
from megatron.zero_bubble.schedule.timeline import Timeline

_LEFT, _RIGHT, _TOP = 76, 24, 66
_CURVE_HEIGHT, _CURVE_GAP = 84, 44
_MIN_WIDTH, MAX_WIDTH = 920, 16000
_MARK_WIDTH = 3
"""Of STEP and VALIDATE, which take no time in a simulation."""


@dataclass(frozen=True)
class _Layout:
    """Where things are, in pixels."""

    begin: float
    duration: float
    lane_height: float
    num_lanes: int
    width: float

    def x(self, time: float) -> float:
        return _LEFT + float(time - self.begin) * (self.width - _LEFT - _RIGHT) / self.duration

    def lane_top(self, rank: int) -> float:
        return _TOP + rank * (self.lane_height + 2)

    @property
    def lanes_bottom(self) -> float:
        return self.lane_top(self.num_lanes)

    def curve_top(self, k: int) -> float:
        return self.lanes_bottom + _CURVE_GAP + 8 + k * (_CURVE_HEIGHT + _CURVE_GAP)


def to_svg(
    timeline: Timeline,
    *,
    title: str | None = None,
    memory_unit: str = "M_B",
    width: int | None = None,
    duration: float | None = None,
) -> str:
    """The drawing as text. Hovering over an operation shows its stage, times and memory.

    Args:
        title: the schedule's name by default.
        memory_unit: names the unit of the costs' memory.
        width: in pixels; wide enough for labels on the operations by default.
        duration: the time that the width shows, at least the makespan, which it is by default. Drawings of the
            same width and duration can be compared.
    """
    layout = _layout(timeline, width, float(duration or timeline.makespan) or 1.0)
    elements = [
        *_header(timeline, layout, title or timeline.schedule.name, memory_unit),
        *_grid(timeline, layout),
        *(element for rank in range(layout.num_lanes) for element in _lane(timeline, layout, rank, memory_unit)),
        *_idle_curve(timeline, layout),
        *_memory_curve(timeline, layout, memory_unit),
    ]
    return canvas.document(layout.width, layout.curve_top(2) - _CURVE_GAP + 16, elements)


def _layout(timeline: Timeline, width: int | None, duration: float) -> _Layout:
    lanes = [lane for lane in timeline.lanes if lane]
    num_lanes = len(timeline.lanes)
    computing = (timed for lane in lanes for timed in lane if timed.op.kind not in POST_VALIDATION)
    shortest = min((float(timed.end - timed.start) for timed in computing), default=1.0)
    if width is None:
        digits = len(str(timeline.schedule.num_microbatches - 1))
        wanted = duration / max(shortest, duration / MAX_WIDTH) * (7 * digits + 5)
        width = int(min(MAX_WIDTH, max(_MIN_WIDTH, wanted + _LEFT + _RIGHT)))
    return _Layout(
        begin=min((lane[0].start for lane in lanes), default=0),
        duration=duration,
        lane_height=24 if num_lanes <= 8 else 20 if num_lanes <= 16 else 16,
        num_lanes=num_lanes,
        width=width,
    )


def _header(timeline: Timeline, layout: _Layout, title: str, memory_unit: str) -> Iterator[str]:
    schedule = timeline.schedule
    yield text(12, 22, title, size=16)
    yield text(
        12,
        40,
        f"{schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches: "
        f"bubble rate {100 * float(timeline.bubble_rate):.2f}%, cost {number(timeline.cost)}, "
        f"peak memory {number(max(timeline.peak_memory))} {memory_unit}",
    )
    x: float = 12
    used = {(timed.op.kind, timed.op.chunk) for lane in timeline.lanes for timed in lane}
    for kind, meaning in palette.MEANINGS.items():
        chunks = sorted(chunk for used_kind, chunk in used if used_kind is kind)
        for chunk in chunks:
            yield rect(x, 48, 12, 12, palette.fill_of(kind, chunk, schedule.num_chunks))
            x += 14
        if chunks:
            yield text(x + 2, 58, meaning, size=11)
            x += 12 + 6.2 * len(meaning)
    if schedule.num_chunks > 1:
        yield text(x + 2, 58, f"(darker: later of {schedule.num_chunks} chunks)", size=11)


def _grid(timeline: Timeline, layout: _Layout) -> Iterator[str]:
    """Vertical lines through lanes and curves, with the time below the lanes."""
    bottom = layout.curve_top(1) + _CURVE_HEIGHT
    for time in canvas.ticks(layout.duration, max(4, int(layout.width / 120))):
        x = layout.x(layout.begin + time)
        yield line(x, layout.lanes_bottom, x, bottom)
        yield text(x, layout.lanes_bottom + 14, number(time, 4), size=10, anchor="middle")
    yield text(_LEFT - 8, layout.lanes_bottom + 14, "time", size=10, anchor="end")


def _lane(timeline: Timeline, layout: _Layout, rank: int, memory_unit: str) -> Iterator[str]:
    schedule, height, top = timeline.schedule, layout.lane_height, layout.lane_top(rank)
    begin, end = layout.begin, layout.begin + timeline.makespan
    size = min(11, height - 5)
    yield text(_LEFT - 8, top + height / 2 + size / 3, f"rank {rank}", size=size, anchor="end")
    yield rect(layout.x(begin), top, layout.x(end) - layout.x(begin), height, "#f2f2f2")
    held = memory_held(schedule, timeline.costs, rank)
    for (op, start, stop), (_, during, _) in zip(timeline.lanes[rank], held, strict=True):
        if op.kind in POST_VALIDATION:
            continue
        fill = palette.fill_of(op.kind, op.chunk, schedule.num_chunks)
        x, width = layout.x(start), layout.x(stop) - layout.x(start)
        tip = (
            f"{op} on rank {rank}, stage {schedule.placement.stage_of(rank, op.chunk)}: "
            f"{number(start, 4)} to {number(stop, 4)} (takes {number(stop - start, 4)}), "
            f"rank holds {number(during, 4)} {memory_unit}"
        )
        yield rect(x, top, max(width - min(0.8, width / 8), 0.1), height, fill, tip)
        for label in (f"{op.kind.value}{op.microbatch}", str(op.microbatch)):
            if len(label) * size * 0.58 + 2 <= width:
                ink = "#ffffff" if palette.is_dark(fill) else INK
                yield text(x + width / 2, top + height / 2 + size / 3, label, size, "middle", ink)
                break
    yield from _marks(timeline, layout, rank)


def _marks(timeline: Timeline, layout: _Layout, rank: int) -> Iterator[str]:
    """STEP and VALIDATE of a lane, above everything else."""
    for op, start, stop in timeline.lanes[rank]:
        if op.kind in POST_VALIDATION:
            width = max(_MARK_WIDTH, layout.x(stop) - layout.x(start))
            x = (layout.x(start) + layout.x(stop) - width) / 2
            tip = f"{op} on rank {rank}, at {number(start, 4)}"
            yield rect(x, layout.lane_top(rank) - 1, width, layout.lane_height + 2, palette.FILLS[op.kind], tip)


def _curve_frame(layout: _Layout, k: int, name: str, largest: float) -> Iterator[str]:
    top = layout.curve_top(k)
    yield text(_LEFT, top - 6, name, size=11)
    for value in canvas.ticks(largest, 3):
        y = top + _CURVE_HEIGHT * (1 - value / largest)
        yield line(_LEFT, y, layout.width - _RIGHT, y)
        yield text(_LEFT - 8, y + 4, number(value, 4), size=10, anchor="end")


def _points(layout: _Layout, k: int, steps: curves.Steps, largest: float) -> list[tuple[float, float]]:
    """The corners of a curve of steps, in pixels."""
    points: list[tuple[float, float]] = []
    for time, value in steps:
        x = layout.x(max(time, layout.begin))
        y = layout.curve_top(k) + _CURVE_HEIGHT * (1 - float(value) / largest)
        if points:
            points.append((x, points[-1][1]))
        points.append((x, y))
    return points


def _idle_curve(timeline: Timeline, layout: _Layout) -> Iterator[str]:
    yield from _curve_frame(layout, 0, "idle ranks", layout.num_lanes)
    points = _points(layout, 0, curves.idle_ranks(timeline), layout.num_lanes)
    if points:
        bottom = layout.curve_top(0) + _CURVE_HEIGHT
        corners = [(points[0][0], bottom), *points, (points[-1][0], bottom)]
        d = "L".join(f"{number(x)} {number(y)}" for x, y in corners)
        yield f'<path d="M{d}Z" fill="#d55e00" fill-opacity="0.55"/>'


def _memory_curve(timeline: Timeline, layout: _Layout, memory_unit: str) -> Iterator[str]:
    largest = float(max(timeline.peak_memory)) or 1.0
    yield from _curve_frame(layout, 1, f"memory of each rank ({memory_unit}), dark: first rank", largest)
    for rank in reversed(range(layout.num_lanes)):
        points = _points(layout, 1, curves.memory(timeline, rank), largest)
        title = f"memory of rank {rank}: at most {number(timeline.peak_memory[rank], 4)} {memory_unit}"
        yield canvas.path(points, palette.colour_of_rank(rank, layout.num_lanes), title, width=1.2)
