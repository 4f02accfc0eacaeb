"""Where each rank takes part in the collectives of vocabulary shards: in one order, and so that none stands still."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.graph import collective_kinds, collective_time, exchange_before, exchanges_after
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, OpKind
from megatron.zero_bubble.schedule.pairs import numbered
from megatron.zero_bubble.schedule.serial_order import SerialOrder


class PlacedCollective(NamedTuple):
    """A collective, and where the ranks take part in it."""

    op: Op
    before: tuple[int, ...]
    """For every rank, the computation before which the rank joins the collective."""
    turn: int
    """The place in the serial order of the computation after which the collective before this one is complete."""


def place_collectives(schedule: Schedule, order: SerialOrder, costs: StageCosts) -> list[PlacedCollective]:
    """The collectives of a schedule in the order in which all ranks run them: the order of their last contributions in
    `order`.

    A rank takes part before the computation that it runs when the collective can begin, which is when the last maker
    has ended and the collective before is complete. With one hardware queue a rank that takes part while the one
    before is under way holds up its next computation until that is complete; where that takes longer than the
    computation would keep the collective waiting, the rank takes part later.

    No schedule stands still for its collectives, however long its operations take. Run all computations one at a time,
    in `order`. Each collective is complete before the first of its users, and before a rank takes part in
    the next one: its last rank takes part before any user of it or of a later collective, and no rank takes
    part in the next one before that. So when a computation starts, its own inputs and the inputs of all earlier
    launches are complete. All ranks take part on the same side of VALIDATE.

    Raises `InvalidSchedule` if an operation that contributes to a collective is missing.
    """
    collectives = _collectives(schedule, order)
    time = collective_time(costs)
    deadlines = [*accumulate((collective.deadline for collective in reversed(collectives)), min)][::-1]
    placed: list[PlacedCollective] = []
    previous, complete = -1, 0.0
    for collective, deadline in zip(collectives, deadlines, strict=True):
        begin = max(collective.ready, complete)
        before = []
        for rank, numbers in enumerate(order.numbers):
            first = max(collective.earliest[rank], bisect_right(numbers, previous))
            wanted = _best_place(order.starts[rank], order.ends[rank], begin, complete)
            before.append(min(max(first, wanted), order.num_before(rank, deadline)))
        placed.append(PlacedCollective(collective.op, tuple(before), previous))
        behind = [(order.numbers[rank][k - 1], order.ends[rank][k - 1]) for rank, k in enumerate(before) if k]
        previous = max([previous, collective.last_maker, *(number for number, _ in behind)])
        complete = max([begin, *(end for _, end in behind)]) + time
    return placed


def _best_place(starts: Sequence[float], ends: Sequence[float], begin: float, complete: float) -> int:
    """The computation of a rank before which it takes part, if nothing but time matters.

    Args:
        begin: when the collective can begin.
        complete: when the one before it is complete.
    """
    running = bisect_right(ends, begin)
    undisturbed = bisect_left(starts, complete)
    if undisturbed <= running or running == len(starts):
        return running
    holds_up, keeps_waiting = complete - starts[running], ends[running] - begin
    return undisturbed if keeps_waiting <= holds_up else running


class _Collective(NamedTuple):
    """A collective, with the bounds on its place in the order of each rank."""

    op: Op
    last_maker: int
    """The place of its last maker in the serial order."""
    ready: float
    """When the last maker ends."""
    deadline: int
    """The place in the serial order of the first computation that comes after the collective everywhere."""
    earliest: tuple[int, ...]
    """For every rank, the first computation after the rank's last contribution to the collective."""


def _collectives(schedule: Schedule, order: SerialOrder) -> list[_Collective]:
    """The collectives of all microbatches, in order."""
    makers: dict[Op, list[tuple[int, int]]] = {
        Op(kind, microbatch): []
        for kind in collective_kinds(schedule)
        for microbatch in range(schedule.num_microbatches)
    }
    users: dict[Op, list[tuple[int, int]]] = {collective: [] for collective in makers}
    for rank, ops in enumerate(schedule.ops if makers else ()):
        ends: dict[tuple[OpKind, int], list[tuple[OpKind, dict[Op, list[tuple[int, int]]]]]] = {}
        """Kind and chunk -> the kinds of collectives that such operations use and make."""
        for position, op in numbered(ops):
            kind, microbatch, chunk = op
            if (kind, chunk) not in ends:
                used = exchange_before(schedule, rank, op)
                made = exchanges_after(schedule, rank, op)
                ends[kind, chunk] = [(each.kind, makers) for each in made]
                if used is not None:
                    ends[kind, chunk].append((used.kind, users))
            for collective, where in ends[kind, chunk]:
                where.setdefault(Op(collective, microbatch), []).append((rank, position))
    collectives = (_bounds(schedule, order, op, made_at, users.get(op, ())) for op, made_at in makers.items())
    return sorted(collectives, key=attrgetter("last_maker"))


def _bounds(
    schedule: Schedule,
    order: SerialOrder,
    op: Op,
    made_at: Sequence[tuple[int, int]],
    used_at: Sequence[tuple[int, int]],
) -> _Collective:
    if not made_at:
        maker = Op(COLLECTIVES[op.kind].maker, op.microbatch)
        raise schedule.invalid(f"no rank makes {maker}, which {op} carries")
    last_maker, ready = max((order.numbers[rank][k], order.ends[rank][k]) for rank, k in made_at)
    next_phase = (number for number in order.first_of_phase if number > last_maker)
    earliest = [0] * schedule.num_ranks
    for rank, position in made_at:
        earliest[rank] = max(earliest[rank], position + 1)
    users = (order.numbers[rank][position] for rank, position in used_at)
    total = sum(map(len, order.numbers))
    return _Collective(op, last_maker, ready, min([total, *users, *next_phase]), tuple(earliest))
