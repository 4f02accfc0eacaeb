"""Lowering of the collectives of vocabulary shards: their order, and their places among the operations of each rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.graph import (
    collective_kinds,
    collective_time,
    exchange_before,
    exchanges_after,
    per_kind,
)
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, POST_VALIDATION
from megatron.zero_bubble.schedule.pairs import computations, numbered
from megatron.zero_bubble.schedule.serial_order import SerialOrder


class PlacedCollective(NamedTuple):
    """A collective, and its place among the operations of every rank."""

    op: Op
    before: tuple[int, ...]
    """Rank -> position of the computation before which the rank joins the collective."""
    turn: int
    """Index, in the serial order, of the computation after which the previous collective is complete."""


def place_collectives(schedule: Schedule, order: SerialOrder, costs: StageCosts) -> list[PlacedCollective]:
    """Place the collectives of a schedule without communication in the same order on all ranks.

    Collectives are sorted by the position of their last contributing operation in the serial order `order`.

    A collective can start when its last contributing operation has ended and the previous collective is complete. By
    default, a rank joins a collective right before the rank's first computation that is planned to end after the
    planned start of the collective. On a GPU with one hardware queue, the computation after the join starts late if the
    previous collective is still in flight. If a rank joins a collective only after the previous collective is complete,
    the collective may start late. Of the two places, before and after the end of the previous collective,
    `place_collectives` chooses the place with the shorter delay.

    Collectives cannot cause a deadlock, however long the operations take. As proof, consider a run of all computations,
    one at a time, in the serial order `order`. Every rank joins a collective before the first operation that needs the
    result of this collective or of a later collective. No rank joins a collective before all ranks have joined the
    previous collective. Because all ranks join collectives early enough and in the same order, the inputs of a
    computation and of all earlier launches are complete when the computation starts. Either all ranks join a collective
    before VALIDATE, or all ranks join the collective after VALIDATE.

    Args:
        order: one order of all ranks' computations (see `SerialOrder`).

    Raises:
        InvalidSchedule: an operation that contributes to a collective is missing.
    """
    collectives = _collectives(schedule, order)
    time = collective_time(costs)
    deadlines = [*accumulate((collective.deadline for collective in reversed(collectives)), min)][::-1]
    placed: list[PlacedCollective] = []
    previous, complete = -1, 0.0
    for collective, deadline in zip(collectives, deadlines, strict=True):
        start = max(collective.ready, complete)
        before = []
        for rank, numbers in enumerate(order.numbers):
            first = max(collective.earliest[rank], bisect_right(numbers, previous))
            preferred = _best_place(order.starts[rank], order.ends[rank], start, complete)
            before.append(min(max(first, preferred), order.num_before(rank, deadline)))
        placed.append(PlacedCollective(collective.op, tuple(before), previous))
        behind = [(order.numbers[rank][k - 1], order.ends[rank][k - 1]) for rank, k in enumerate(before) if k]
        previous = max([previous, collective.last_maker, *(number for number, _ in behind)])
        complete = max([start, *(end for _, end in behind)]) + time
    return placed


def joined_early(schedule: Schedule) -> Schedule:
    """Let every rank of a lowered schedule join each collective as early as possible.

    If a separate thread waits for a collective, joining the collective early delays no computation of the rank. If a
    rank joins a collective late, as `place_collectives` may choose, the result arrives late on all ranks. With
    `joined_early`, a rank joins a collective as soon as two conditions hold: the rank has joined the previous
    collective, and has run all of its own operations that contribute to the collective. No collective moves across STEP
    or VALIDATE. The order of the collectives stays the same, so that ranks cannot deadlock.
    """
    return replace(schedule, ops=tuple(_joined_early(schedule, rank) for rank in range(schedule.num_ranks)))


def _joined_early(schedule: Schedule, rank: int) -> tuple[Op, ...]:
    made_after: dict[Op, int] = {}
    """Collective -> position of the rank's last operation that contributes to the collective."""
    keys: list[tuple[int, int, tuple[Op, ...]]] = []
    """(sort key of the place, sort key among operations with the same place, operation or pair)."""
    earliest = -1
    for place, together in enumerate(computations(schedule.ops[rank])):
        collective = together[-1]
        if collective.kind in COLLECTIVES:
            earliest = max(earliest, made_after.get(collective, -1))
            keys.append((earliest, len(keys), together))
            continue
        if collective.kind in POST_VALIDATION:
            earliest = place
        made_after |= {made: place for op in together for made in exchanges_after(schedule, rank, op)}
        keys.append((place, -1, together))
    return tuple(op for _, _, together in sorted(keys, key=itemgetter(0, 1)) for op in together)


def _best_place(starts: Sequence[float], ends: Sequence[float], start: float, complete: float) -> int:
    """Position before which a rank joins a collective with the shortest delay, by planned times alone.

    `starts` and `ends` are the times of the rank's computations, `start` is the earliest start of the collective, and
    `complete` the time at which the previous collective is complete.
    """
    running = bisect_right(ends, start)
    undisturbed = bisect_left(starts, complete)
    if undisturbed <= running or running == len(starts):
        return running
    delay_of_rank, delay_of_collective = complete - starts[running], ends[running] - start
    return undisturbed if delay_of_collective <= delay_of_rank else running


class _Collective(NamedTuple):
    """A collective, and the range of its allowed positions among the operations of each rank."""

    op: Op
    last_maker: int
    """Index, in the serial order, of the last operation that contributes to the collective."""
    ready: float
    """End time of the last operation that contributes to the collective."""
    deadline: int
    """Index, in the serial order, of the first computation before which all ranks must have joined the collective."""
    earliest: tuple[int, ...]
    """Rank -> position right after the rank's last operation that contributes to the collective."""


def _collectives(schedule: Schedule, order: SerialOrder) -> list[_Collective]:
    """The collectives of all microbatches, in the order of their last contributing operations."""
    makers: dict[Op, list[tuple[int, int]]] = {
        Op(kind, microbatch): []
        for kind in collective_kinds(schedule)
        for microbatch in range(schedule.num_microbatches)
    }
    users: dict[Op, list[tuple[int, int]]] = {collective: [] for collective in makers}
    for rank, ops in enumerate(schedule.ops if makers else ()):
        made = per_kind(ops, partial(exchanges_after, schedule, rank))
        used = per_kind(ops, partial(exchange_before, schedule, rank))
        for position, (kind, microbatch, chunk) in numbered(ops):
            for collective in made[kind, chunk]:
                makers.setdefault(collective._replace(microbatch=microbatch), []).append((rank, position))
            needed = used[kind, chunk]
            if needed is not None:
                users.setdefault(needed._replace(microbatch=microbatch), []).append((rank, position))
    collectives = []
    total = sum(map(len, order.numbers))
    for op, made_at in makers.items():
        if not made_at:
            maker = Op(COLLECTIVES[op.kind].maker, op.microbatch)
            raise schedule.invalid(f"no rank makes {maker}, which {op} carries")
        last_maker, ready = max((order.numbers[rank][k], order.ends[rank][k]) for rank, k in made_at)
        next_phase = (number for number in order.first_of_phase if number > last_maker)
        earliest = [0] * schedule.num_ranks
        for rank, position in made_at:
            earliest[rank] = max(earliest[rank], position + 1)
        first_users = (order.numbers[rank][position] for rank, position in users.get(op, ()))
        deadline = min([total, *first_users, *next_phase])
        collectives.append(_Collective(op, last_maker, ready, deadline, tuple(earliest)))
    return sorted(collectives, key=attrgetter("last_maker"))
