"""The CSV dialect that `_dump_csv` and `_load_csv` of torch.distributed.pipelining write and read.

The CSV has a row for each rank and a cell for each action. A cell contains the stage, the letters of the action and the
microbatch, as in `3F0`. PyTorch writes I for the gradient of the input (our B), W for the gradient of the weights, and
B for both gradients (our BW). An empty cell is an idle slot. `(0F1;3B0)OVERLAP_F_B` is a pair: a forward and a backward
that run as one operation. `schedule_from_pytorch_csv` leaves out sends, receives and the actions of FSDP.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import NamedTuple

from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Op, Placement, PlacementKind, Schedule
from megatron.zero_bubble.schedule.kinds import COMMUNICATION, KINDS, PAIRED, OpKind

_KINDS = {(facts.pytorch, facts.pairs_with is not None): kind for kind, facts in KINDS.items() if facts.pytorch}
"""(letters, True for the backward of a pair, else False) -> kind of operation."""
_STARTED = {"REDUCE_GRAD"} | {KINDS[kind].pytorch for kind in COMMUNICATION}
_LEFT_OUT = {"UNSHARD", "RESHARD"} | _STARTED | {f"WAIT_{word}" for word in _STARTED}
_ACTION = re.compile(r"(\d{1,9})([A-Z_]+?)(\d{0,9})", re.ASCII)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class _Action(NamedTuple):
    stage: int
    kind: OpKind
    microbatch: int


def schedule_to_pytorch_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV for PyTorch's `_load_csv`.

    The argument `format` of `_load_csv` must be "compute_comms" for a schedule with communication, and "compute_only"
    for a schedule without communication.

    Raises:
        ScheduleError: the schedule has an operation for which PyTorch's CSV has no letters, such as STEP, or recomputes
            layers in several groups.
    """
    nameless = [kind for kind, facts in KINDS.items() if kind in schedule.kinds and facts.makes and not facts.pytorch]
    if nameless:
        *others, last = nameless
        words = f"{', '.join(others)} and {last}" if others else last
        raise ScheduleError(
            f"schedule {schedule.name} has {words}, for which PyTorch's CSV has no word: write JSON or CSV"
        )
    if schedule.groups:
        raise ScheduleError(
            f"schedule {schedule.name} recomputes groups of layers, for which PyTorch's CSV has no word: "
            "write JSON or CSV"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    for rank, ops in enumerate(schedule.ops):
        stages, cells = schedule.placement.stages_of(rank), list[str]()
        for op in ops:
            cell = f"{stages[op.chunk]}{KINDS[op.kind].pytorch}{op.microbatch}"
            cells.append(f"({cells.pop()};{cell})OVERLAP_F_B" if op.kind in PAIRED else cell)
        writer.writerow(cells)
    return text.getvalue()


def schedule_from_pytorch_csv(text: str, name: str = "pytorch") -> Schedule:
    """Read a schedule from the CSV of PyTorch's `_dump_csv`; the schedule is not validated.

    The schedule has no sends or receives. Each rank has exactly the stages that occur in the actions of the rank's row.

    Args:
        text: CSV that PyTorch's `_dump_csv` has written.
        name: name of the schedule.

    Raises:
        ScheduleError: the text is not in PyTorch's format, or the placement is neither linear nor interleaved nor a V.
    """
    try:
        rows = [list(_actions(row)) for row in csv.reader(io.StringIO(text), strict=True)]
    except csv.Error as error:
        raise ScheduleError(f"not CSV: {error}") from None
    while rows and not rows[-1]:
        rows.pop()  # blank lines at the end
    if not rows:
        raise ScheduleError("no actions found: expected a row a rank, with cells such as 0F0")
    placement = placement_of([sorted({action.stage for action in row}) for row in rows])
    num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
    ops = (tuple(Op(kind, mb, placement.chunk_of(stage)) for stage, kind, mb in row) for row in rows)
    return Schedule(name, placement, num_microbatches, tuple(ops))


def _actions(cells: list[str]) -> Iterator[_Action]:
    for cell in cells:
        overlap = _OVERLAP.fullmatch(cell.strip())
        for number, word in enumerate(overlap[1].split(";") if overlap else [cell]):
            word = word.strip()
            match = _ACTION.fullmatch(word)
            if not word or (match and match[2] in _LEFT_OUT):
                continue
            kind = _KINDS.get((match[2], overlap is not None and number > 0)) if match else None
            if not match or kind is None or not match[3]:
                raise ScheduleError(
                    f"{word!r} is not an action: expected stage, F, I, W or B, and microbatch, as in 2F0"
                )
            yield _Action(int(match[1]), kind, int(match[3]))


def placement_of(stages: list[list[int]]) -> Placement:
    """The placement in which rank r has the stages `stages[r]`.

    Raises:
        ScheduleError: no placement has the given stages.
    """
    num_ranks, num_chunks = len(stages), len(stages[0])
    kinds: tuple[PlacementKind, ...] = ("linear",) if num_chunks == 1 else ("interleaved", "v")
    for kind in kinds if num_chunks else ():
        placement = Placement(kind, num_ranks, num_chunks)
        if stages == [list(placement.stages_of(rank)) for rank in range(num_ranks)]:
            return placement
    raise ScheduleError(f"stages by rank are {stages}: expected a linear, an interleaved or a V-shaped placement")
