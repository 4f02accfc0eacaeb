"""Schedules as a grid for people and spreadsheets: a row for each rank, a column for each time slot.

F, B, W and R take one time slot each, and BW (fused backward) takes two time slots. If a forward and a backward run as
one operation (a pair), the backward takes the time slots of both operations. Cells of idle time slots are empty.
Operations that take no time, such as STEP and D, have columns of their own between two time slots. If stages recompute
activations in groups of layers, the first two lines of the CSV have an additional column with the number of groups of
each stage. The grid contains no sends, receives or collectives; `lower` adds this communication again.
"""

from __future__ import annotations

import csv
import io
import re
from bisect import bisect_left, bisect_right
from dataclasses import replace

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.simulate import simulate

_HEADER = ("schedule", "placement", "ranks", "chunks", "microbatches")
_GROUPS = "groups"


def _grid_cells(schedule: Schedule) -> tuple[list[list[str]], frozenset[int]]:
    """Return the cells of every rank, and the indices of the columns for operations that take no time.

    A cell names the operation that starts in the time slot, is `-` if an earlier operation continues, and is empty
    otherwise.
    """
    # With several groups of layers, operations would take fractions of a time slot.
    timeline = simulate(replace(schedule, groups=()), StageCosts.uniform(schedule.num_stages, time_r=1))
    timed_ops = [timed for lane in timeline.lanes for timed in lane]
    instants = sorted({int(timed.start) for timed in timed_ops if timed.start == timed.end})
    num_slots = int(max((timed.end for timed in timed_ops), default=0))
    rows = []
    for lane in timeline.lanes:
        row = [""] * (num_slots + len(instants))
        for op, start, end in lane:
            if start == end:
                column = int(start) + bisect_left(instants, int(start))
                row[column] = f"{row[column]} {op}".strip()  # a cell may have STEP and the next VALIDATE
                continue
            first, last = (slot + bisect_right(instants, slot) for slot in (int(start), int(end) - 1))
            row[first : last + 1] = [str(op)] + ["-"] * (last - first)
        rows.append(row)
    return rows, frozenset(k + instant for k, instant in enumerate(instants))


def schedule_to_grid(schedule: Schedule) -> str:
    """Write a schedule as a grid for a terminal, with a line for each rank.

    Raises:
        Deadlock: some ranks wait for each other forever.
    """
    rows, narrow = _grid_cells(schedule)
    longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    width = max((length for k, length in enumerate(longest) if k not in narrow), default=0)
    widths = [length if k in narrow else width for k, length in enumerate(longest)]
    lines = []
    for rank, row in enumerate(rows):
        cells = " ".join(("-" * w if cell == "-" else cell).ljust(w) for cell, w in zip(row, widths, strict=True))
        lines.append(f"rank {rank:<{len(str(len(rows) - 1))}} | {cells}".rstrip())
    return "\n".join(lines) + "\n"


def schedule_to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV: two lines with the schedule's name, placement and number of microbatches, then the grid.

    Raises:
        Deadlock: some ranks wait for each other forever.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    placement = schedule.placement
    sizes = (placement.num_ranks, placement.num_chunks, schedule.num_microbatches)
    groups = " ".join(map(str, schedule.groups))
    writer.writerow((*_HEADER, *(_GROUPS,) * bool(groups)))
    writer.writerow((schedule.name, placement.kind, *sizes, *(groups,) * bool(groups)))
    writer.writerows(_grid_cells(schedule)[0])
    return text.getvalue()


def schedule_from_csv(text: str) -> Schedule:
    """Read a schedule from the CSV of `schedule_to_csv`; the schedule is not validated.

    The schedule has no sends, receives or collectives. The operations of a rank run in the order of the cells in the
    row of the rank. The number of empty cells between two operations has no effect.

    Raises:
        ScheduleError: the text is not in the format of `schedule_to_csv`.
    """
    try:
        # Spreadsheets write the separator of the user's language, and may quote all cells.
        separator = next((character for character in text.partition("\n")[0] if character in ",;\t"), ",")
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=separator, strict=True) if row]
    except csv.Error as error:
        raise ScheduleError(f"not CSV: {error}") from None
    # A spreadsheet makes all rows equally long, and may end them with empty cells.
    rows[:2] = [row[: max((k + 1 for k, cell in enumerate(row) if cell), default=0)] for row in rows[:2]]
    heads = tuple(rows[0]) if rows else ()
    if len(rows) < 2 or heads not in (_HEADER, (*_HEADER, _GROUPS)) or len(rows[1]) != len(heads):
        raise ScheduleError(f"expected a first line {','.join(_HEADER)} and a second line with their values")
    name, kind, *sizes = rows[1][: len(_HEADER)]
    groups = rows[1][len(_HEADER) :]
    if not all(re.fullmatch("[0-9]{1,9}", size) for size in sizes):
        raise ScheduleError(f"ranks, chunks and microbatches must be whole numbers, got {', '.join(sizes)}")
    num_ranks, num_chunks, num_microbatches = map(int, sizes)
    placement = Placement(kind, num_ranks, num_chunks)  # type: ignore[arg-type]  # `Placement` checks the kind
    ops = tuple(tuple(Op.parse(word) for cell in row for word in cell.split() if word.strip("-")) for row in rows[2:])
    if groups and not re.fullmatch("[0-9]{1,9}( [0-9]{1,9})*", groups[0]):
        raise ScheduleError(f"groups must be whole numbers, one a stage, got {groups[0]!r}")
    return Schedule(name, placement, num_microbatches, ops, tuple(map(int, groups[0].split())) if groups else ())
