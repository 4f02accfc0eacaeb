"""Schedules as a grid: a row a rank, a column a time slot. For eyes and spreadsheets.

The slots are those of a run in which F, B and W take one slot each, BW two, and communication none; a rank
that waits leaves cells empty. Communication operations are left out: `lower` puts them back.
"""

from __future__ import annotations

import csv
import io
import re

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement, Schedule
from megatron.zero_bubble.schedule.serialize.words import parse_op
from megatron.zero_bubble.schedule.simulate import simulate

_HEADER = ("schedule", "placement", "ranks", "chunks", "microbatches")


def _slots(schedule: Schedule) -> list[list[str]]:
    """For every rank and slot, the operation that starts there, `-` where one goes on, or nothing."""
    timeline = simulate(schedule, StageCosts.uniform(schedule.num_stages))
    width = int(max((lane[-1].end for lane in timeline.lanes if lane), default=0))
    rows = []
    for lane in timeline.lanes:
        row = [""] * width
        for op, start, end in lane:
            row[int(start)] = str(op)
            for slot in range(int(start) + 1, int(end)):
                row[slot] = "-"
        rows.append(row)
    return rows


def schedule_to_grid(schedule: Schedule) -> str:
    """The grid as text for a terminal, a line a rank. Raises `Deadlock` if the schedule cannot run."""
    rows = _slots(schedule)
    width = max((len(cell) for row in rows for cell in row), default=0)
    lines = []
    for rank, row in enumerate(rows):
        cells = " ".join(("-" * width if cell == "-" else cell).ljust(width) for cell in row)
        lines.append(f"rank {rank:<{len(str(len(rows) - 1))}} | {cells}".rstrip())
    return "\n".join(lines) + "\n"


def schedule_to_csv(schedule: Schedule) -> str:
    """The grid as CSV, below two lines that say what schedule it is. Raises `Deadlock` if it cannot run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    placement = schedule.placement
    writer.writerow(_HEADER)
    writer.writerow(
        (schedule.name, placement.kind, placement.num_ranks, placement.num_chunks, schedule.num_microbatches)
    )
    writer.writerows(_slots(schedule))
    return text.getvalue()


def schedule_from_csv(text: str) -> Schedule:
    """The schedule, without communication, that `schedule_to_csv` wrote. It is not validated.

    Where the cells stand in a row does not matter, only their order. Raises `ScheduleError`.
    """
    try:
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"not CSV: {error}") from None
    if len(rows) < 2 or tuple(rows[0]) != _HEADER or len(rows[1]) != len(_HEADER):
        raise ScheduleError(f"expected a first line {','.join(_HEADER)} and a second with their values")
    name, kind, *sizes = rows[1]
    if not all(re.fullmatch("[0-9]{1,9}", size) for size in sizes):
        raise ScheduleError(f"ranks, chunks and microbatches must be whole numbers, got {', '.join(sizes)}")
    num_ranks, num_chunks, num_microbatches = map(int, sizes)
    placement = Placement(kind, num_ranks, num_chunks)  # type: ignore[arg-type]  # it checks the kind
    ops = tuple(tuple(parse_op(cell.strip()) for cell in row if cell.strip(" -")) for row in rows[2:])
    return Schedule(name, placement, num_microbatches, ops)
