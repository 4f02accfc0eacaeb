"""The rows of the ranks in a drawing: operations, idle percentages, messages, and the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import hypot

from megatron.zero_bubble.schedule.analysis import BUBBLE_WORDS, Bubble, bubbles, critical_path, messages
from megatron.zero_bubble.schedule.draw import palette
from megatron.zero_bubble.schedule.draw.canvas import (
    LABEL_INKS,
    LANE,
    PAPER,
    STRONG,
    corners,
    figure,
    label,
    number,
    rect,
    text,
)
from megatron.zero_bubble.schedule.draw.drawing import LEFT, Drawing
from megatron.zero_bubble.schedule.ir import Op
from megatron.zero_bubble.schedule.kinds import COPIES, KINDS, PAIRED, POST_VALIDATION
from megatron.zero_bubble.schedule.pairs import forwards_in_pairs

_MARK_WIDTH = 3
"""Smallest width of a mark in pixels. A mark shows a STEP, a VALIDATE, or an operation that takes no time."""
_ARROW_HEAD = 5


def lanes(drawing: Drawing) -> Iterator[str]:
    """Yield the SVG elements of the rows of all ranks.

    Hovering over an operation shows the messages of its microbatch.
    """
    for rank, bubble in enumerate(bubbles(drawing.timeline)):
        yield from _frame(drawing, rank, bubble)
    for elements_of_lane in (_operations, _copies):
        groups: dict[int, list[str]] = defaultdict(list)
        for rank in range(drawing.num_lanes):
            for microbatch, element in elements_of_lane(drawing, rank):
                groups[microbatch].append(element)
        for microbatch, elements in sorted(groups.items()):
            yield f'<g class="m m{microbatch}">{"".join(elements)}</g>'
    yield from _critical_path(drawing)
    for rank in range(drawing.num_lanes):
        yield from _marks(drawing, rank)
    yield from _messages(drawing)


def style(drawing: Drawing) -> str:
    """CSS that shows the arrows of the microbatch under the pointer, and dims all other microbatches."""
    microbatches = range(drawing.timeline.schedule.num_microbatches)
    shown = ",".join(f".m{k}:hover~.a{k}" for k in microbatches)
    return (
        ".o,.s{rx:1.5px}.a,.p{pointer-events:none}.a{visibility:hidden}"
        f".m:hover .o{{stroke:{STRONG};stroke-width:1}}svg:has(.m:hover) .m:not(:hover){{opacity:.4}}"
        + (f"{shown}{{visibility:visible}}" if shown else "")
    )


def _frame(drawing: Drawing, rank: int, bubble: Bubble) -> Iterator[str]:
    """Yield the background, name and idle percentage of a rank's row; a tooltip lists the causes of idle time."""
    timeline = drawing.timeline
    top, height = drawing.lane_top(rank), drawing.lane_height
    size = max(8, min(11, height - 3))
    end = drawing.x(drawing.start + timeline.makespan)
    yield rect(LEFT, top, end - LEFT, height, LANE)
    if rank % max(1, round(10 / height)) == 0:
        baseline = drawing.middle(rank) + size / 3
        share = float(bubble.total / timeline.makespan) if timeline.makespan else 0.0
        causes = (f"{word} {figure(getattr(bubble, name))}" for name, word in BUBBLE_WORDS if getattr(bubble, name))
        tip = f"rank {rank} idles {figure(bubble.total)} of {figure(timeline.makespan)} {drawing.time_unit}"
        yield text(LEFT - 8, baseline, f"rank {rank}", size, "end")
        yield text(drawing.right + 8, baseline, f"{100 * share:.1f}%", size)
        yield rect(
            drawing.right, top, drawing.width - drawing.right, height, "transparent", f"{tip}: {', '.join(causes)}"
        )


def _operations(drawing: Drawing, rank: int) -> Iterator[tuple[int, str]]:
    """Yield (microbatch, SVG element) for each operation in a rank's row, except D, H and marks (see `_marks`)."""
    timeline, schedule = drawing.timeline, drawing.timeline.schedule
    unit, lane, in_pairs = drawing.time_unit, timeline.lanes[rank], forwards_in_pairs(schedule, rank)
    memory = timeline.memory_held(rank)
    for position, ((op, start, stop), (_, during, _)) in enumerate(zip(lane, memory, strict=True)):
        top, height = drawing.lane_top(rank), drawing.lane_height
        if op in in_pairs or op.kind in PAIRED:
            # The forward of a pair is in the upper half of the row, the backward in the lower half.
            top += height / 2 * (op.kind in PAIRED)
            start, stop, height = *lane[position + (op in in_pairs)][1:], height / 2
        elif _is_mark(op, start, stop) or op.kind in COPIES:
            continue
        fill = palette.fill_of(op.kind, op.chunk, schedule.num_chunks)
        x, width = drawing.x(start), drawing.x(stop) - drawing.x(start)
        tip = (
            f"{drawing.name(op)} on rank {rank}, stage {schedule.placement.stage_of(rank, op.chunk)}: "
            f"{figure(start)} to {figure(stop)} {unit} (takes {figure(stop - start)})"
        )
        if drawing.has_memory:
            tip += f", rank holds {figure(during)} {drawing.memory_unit}"
        yield op.microbatch, rect(x, top, max(width - min(0.8, width / 8), 0.1), height, fill, tip, "o")
        size = drawing.label_size(op, width)
        if size is not None:
            size = min(size, height - 2)
            y, ink = top + height / 2 + size / 3, LABEL_INKS[palette.is_dark(fill)]
            words, squeezed = drawing.label(op), drawing.squeezed(op, width)
            yield op.microbatch, label(x + width / 2, y, words, size, ink, squeezed)


def _copies(drawing: Drawing, rank: int) -> Iterator[tuple[int, str]]:
    """Yield (microbatch, SVG element) for every copy on the host link of a rank, at the bottom of the rank's row."""
    timeline = drawing.timeline
    height = max(2, drawing.lane_height / 6)
    top = drawing.lane_top(rank) + drawing.lane_height - height
    for op, start, stop in timeline.copies[rank] if timeline.copies else ():
        fill = palette.fill_of(op.kind, op.chunk, timeline.schedule.num_chunks)
        tip = (
            f"{drawing.name(op)} on the host link of rank {rank}: {figure(start)} to {figure(stop)} "
            f"{drawing.time_unit} (takes {figure(stop - start)})"
        )
        width = max(drawing.x(stop) - drawing.x(start), 0.5)
        yield op.microbatch, rect(drawing.x(start), top, width, height, fill, tip, "o")


def _is_mark(op: Op, start: float, stop: float) -> bool:
    """Whether an operation is drawn as a mark: STEP, VALIDATE, or an operation that takes no time."""
    return op.kind in POST_VALIDATION or start == stop


def _marks(drawing: Drawing, rank: int) -> Iterator[str]:
    """Yield the marks of STEP, VALIDATE and operations that take no time, except D, H and the forwards of pairs."""
    in_pairs = forwards_in_pairs(drawing.timeline.schedule, rank)
    for op, start, stop in drawing.timeline.lanes[rank]:
        if op not in in_pairs and op.kind not in COPIES and _is_mark(op, start, stop):
            width = max(_MARK_WIDTH, drawing.x(stop) - drawing.x(start))
            x = (drawing.x(start) + drawing.x(stop) - width) / 2
            tip = f"{drawing.name(op)} on rank {rank}, at {figure(start)} {drawing.time_unit}"
            top, height = drawing.lane_top(rank) - 1, drawing.lane_height + 2
            yield rect(x, top, width, height, KINDS[op.kind].colour, tip, "s")


def _critical_path(drawing: Drawing) -> Iterator[str]:
    """Yield a line along the lower edge of the operations of the critical path."""
    points: list[tuple[float, float]] = []
    for rank, (_, start, end) in critical_path(drawing.timeline):
        y = drawing.lane_top(rank) + drawing.lane_height - 2.5
        points += [(drawing.x(start), y), (drawing.x(end), y)]
    if points:
        yield from _on_everything("p", corners(points))


def _messages(drawing: Drawing) -> Iterator[str]:
    """Yield the arrows of all messages; hovering over an operation shows the arrows of its microbatch."""
    arrows: dict[int, list[str]] = defaultdict(list)
    for source, sent, destination, used in messages(drawing.timeline):
        start = drawing.x(sent.end), drawing.middle(source)
        end = drawing.x(used.start), drawing.middle(destination)
        arrows[used.op.microbatch].append(_arrow(*start, *end))
    for microbatch, paths in sorted(arrows.items()):
        yield from _on_everything(f"a a{microbatch}", "".join(paths))


def _on_everything(kind: str, d: str) -> Iterator[str]:
    """Yield a line that is visible on any colour: a dark line on a wider light line."""
    for stroke, width in ((PAPER, 3.5), (STRONG, 1.5)):
        yield f'<path class="{kind}" d="{d}" stroke="{stroke}" stroke-width="{width}" fill="none"/>'


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """The SVG path of an arrow with a head of two strokes."""
    length = hypot(x2 - x1, y2 - y1) or 1
    along_x, along_y = _ARROW_HEAD * (x2 - x1) / length, _ARROW_HEAD * (y2 - y1) / length
    heads = ((x2 - along_x + side * along_y * 0.6, y2 - along_y - side * along_x * 0.6) for side in (1, -1))
    (ax, ay), (bx, by) = heads
    return (
        f"M{number(x1, 1)} {number(y1, 1)}L{number(x2, 1)} {number(y2, 1)}"
        f"M{number(ax, 1)} {number(ay, 1)}L{number(x2, 1)} {number(y2, 1)}L{number(bx, 1)} {number(by, 1)}"
    )
