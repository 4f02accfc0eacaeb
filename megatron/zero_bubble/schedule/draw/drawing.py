"""Positions, sizes and labels of the elements in a drawing of a timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypedDict

from megatron.zero_bubble.schedule.draw.palette import fill_of
from megatron.zero_bubble.schedule.ir import Op
from megatron.zero_bubble.schedule.kinds import KINDS, POST_VALIDATION, OpKind
from megatron.zero_bubble.schedule.step_ops import operation_name
from megatron.zero_bubble.schedule.timeline import Timeline

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_WIDTH = 16000
_MIN_WIDTH, _WIDEST_BY_ITSELF = 920, 1400
LEFT, RIGHT, TOP = 76, 60, 82
CURVE_HEIGHT, CURVE_GAP = 72, 42
_SMALLEST_TYPE, _LARGEST_TYPE = 6, 11
_LABEL_MARGIN = 2
"""Width in pixels that the label of an operation leaves free."""
_SHORTEST_WITH_LABEL = 0.1
"""Labels of operations shorter than this fraction of the longest operation do not affect the width of a drawing."""


@dataclass(frozen=True)
class Drawing:
    """A timeline, and the positions and sizes, in pixels, of the elements of its drawing; fields as in `Options`."""

    timeline: Timeline
    title: str
    time_unit: str
    memory_unit: str
    steps: int
    width: float
    duration: float

    @property
    def num_lanes(self) -> int:
        return len(self.timeline.lanes)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of one iteration."""
        return self.timeline.schedule.num_microbatches // self.steps

    def name(self, op: Op) -> str:
        """The name of an operation for tooltips."""
        return operation_name(op, self.num_microbatches, self.steps)

    def label(self, op: Op) -> str:
        """The label on an operation: its kind and its microbatch within the iteration."""
        return f"{op.kind.value.removeprefix('&')}{op.microbatch % self.num_microbatches}"

    @cached_property
    def start(self) -> float:
        """The earliest start of an operation."""
        return min((lane[0].start for lane in self.timeline.lanes if lane), default=0)

    def x(self, time: float) -> float:
        return LEFT + float(time - self.start) * (self.width - LEFT - RIGHT) / self.duration

    @property
    def right(self) -> float:
        """The x coordinate, in pixels, of the right end of the ranks' rows."""
        return self.width - RIGHT

    @cached_property
    def lane_height(self) -> float:
        return next((height for most, height in ((8, 26), (16, 20), (32, 15), (64, 11)) if self.num_lanes <= most), 7)

    def lane_top(self, rank: int) -> float:
        return TOP + rank * (self.lane_height + 2)

    def middle(self, rank: int) -> float:
        return self.lane_top(rank) + self.lane_height / 2

    @property
    def lanes_bottom(self) -> float:
        return self.lane_top(self.num_lanes)

    def curve_top(self, k: int) -> float:
        return self.lanes_bottom + CURVE_GAP + 16 + k * (CURVE_HEIGHT + CURVE_GAP)

    @cached_property
    def has_memory(self) -> bool:
        """Whether the timeline has memory costs; a measured timeline without a profile has none."""
        return max(self.timeline.peak_memory, default=0) > 0

    @property
    def height(self) -> float:
        return self.curve_top(1 + self.has_memory) - CURVE_GAP + 16

    @cached_property
    def _label_sizes(self) -> dict[OpKind, float]:
        """Kind of operation -> font size at which 90% of its labels fit; kinds without a readable size are left out."""
        scale = (self.width - LEFT - RIGHT) / self.duration
        sizes: dict[OpKind, list[float]] = defaultdict(list)
        for kind, time, width in self._labels():
            sizes[kind].append((time * scale - _LABEL_MARGIN) / width)
        largest = min(_LARGEST_TYPE, self.lane_height - 7)
        fitting = {kind: min(largest, sorted(each)[len(each) // 10]) for kind, each in sizes.items()}
        return {kind: size for kind, size in fitting.items() if size >= _SMALLEST_TYPE}

    @cached_property
    def legend(self) -> list[tuple[float, list[str], str]]:
        """The entries of the legend: (x, colours of the chunks, text). The last legend entry is the critical path."""
        num_chunks = self.timeline.schedule.num_chunks
        used = {(timed.op.kind, timed.op.chunk) for lane in self.timeline.lanes for timed in lane}
        entries = [
            ([fill_of(kind, chunk, num_chunks) for chunk in range(num_chunks) if (kind, chunk) in used], facts.meaning)
            for kind, facts in KINDS.items()
        ]
        entries = [(colours, words) for colours, words in entries if colours]
        if num_chunks > 1:
            entries.append(([], f"(darker: later of {num_chunks} chunks)"))
        places: list[tuple[float, list[str], str]] = []
        x: float = 12
        for colours, words in (*entries, ([], "critical path")):
            places.append((x, colours, words))
            x += 14 * len(colours) + 16 + 5.6 * len(words)
        return places

    @property
    def width_for_legend(self) -> float:
        x, _, words = self.legend[-1]
        return x + 21 + 6 * len(words)

    @property
    def width_for_labels(self) -> float:
        """Drawing width at which 90% of the labels fit in the largest font; labels of short operations are ignored."""
        labels = [(time, width) for _, time, width in self._labels()]
        shortest = _SHORTEST_WITH_LABEL * max((time for time, _ in labels), default=0)
        scales = sorted((_LARGEST_TYPE * width + _LABEL_MARGIN) / time for time, width in labels if time > shortest)
        return LEFT + RIGHT + self.duration * (scales[-(len(scales) // 10) - 1] if scales else 0)

    def _labels(self) -> Iterator[tuple[OpKind, float, float]]:
        """Yield (kind, duration, width of the label at font size 1) of each operation that may have a label."""
        timed = (op_time for lane in self.timeline.lanes for op_time in lane if op_time.op.kind not in POST_VALIDATION)
        timed = (op_time for op_time in timed if op_time.end > op_time.start)
        return (
            (op_time.op.kind, float(op_time.end - op_time.start), _type_width(self.label(op_time.op)))
            for op_time in timed
        )

    def label_size(self, op: Op, width: float) -> float | None:
        """The font size of the label of an operation that is `width` pixels wide; None if the label does not fit."""
        size, room = self._label_sizes.get(op.kind), (width - _LABEL_MARGIN) * 1.001
        return size if size is not None and _type_width(self.label(op)) * size <= room else None

    def squeezed(self, op: Op, width: float) -> float | None:
        """The width in pixels to which the label of an operation is narrowed; None if the label fits unchanged."""
        letters = (0.96 if letter == "W" else 0.62 for letter in self.label(op))
        natural = sum(letters) * self._label_sizes[op.kind]
        return width - _LABEL_MARGIN if natural > width - _LABEL_MARGIN else None


class Options(TypedDict, total=False):
    """The keyword arguments of every function that draws a timeline."""

    title: str | None
    """Title of the drawing; by default the name of the schedule."""
    time_unit: str
    """Name of the unit of time of the costs; by default `ms`."""
    memory_unit: str
    """Name of the unit of memory of the costs; by default `M_B`."""
    steps: int
    """Number of iterations of the schedule (see `repeat`), by default 1."""
    width: int | None
    """Width of the drawing in pixels; by default wide enough for labels on operations, up to a maximum."""
    duration: float | None
    """Duration that the width represents, by default the makespan; equal widths and durations give equal scales."""


def drawing(timeline: Timeline, *, widest: int = _WIDEST_BY_ITSELF, **options: Unpack[Options]) -> Drawing:
    """Lay out the drawing of a timeline.

    Args:
        timeline: timeline to draw.
        widest: upper limit, in pixels, of the drawing width chosen for the labels; unused if `options` gives the width.
        options: see `Options`.
    """
    drawing = Drawing(
        timeline,
        title=options.get("title") or timeline.schedule.name,
        time_unit=options.get("time_unit", "ms"),
        memory_unit=options.get("memory_unit", "M_B"),
        steps=options.get("steps", 1),
        width=_MIN_WIDTH,
        duration=float(options.get("duration") or timeline.makespan) or 1.0,
    )
    width = options.get("width")
    if width is None:
        width = int(max(_MIN_WIDTH, drawing.width_for_legend, min(widest, drawing.width_for_labels)))
    return replace(drawing, width=width)


def _type_width(label: str) -> float:
    """Smallest width to which a label may be narrowed (see `Drawing.squeezed`), as a multiple of the font size."""
    return sum(0.66 if letter == "W" else 0.6 for letter in label)
