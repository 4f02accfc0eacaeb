"""Checks that a schedule is complete, has no deadlock, and adds up gradients in microbatch order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import product

from megatron.zero_bubble.schedule.collector import paused_collector
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import InvalidSchedule
from megatron.zero_bubble.schedule.graph import (
    collective_kinds,
    exchange_before,
    exchanges_after,
    is_at,
    other_end,
    per_kind,
    receive_before,
    send_after,
    sources,
)
from megatron.zero_bubble.schedule.host_link import check_copies
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import (
    COLLECTIVES,
    COMMUNICATION,
    FORWARDS,
    KINDS,
    PAIRED,
    RECEIVES,
    SENDS,
    VOCABULARY,
    OpKind,
)
from megatron.zero_bubble.schedule.pairs import check_pairs, forwards_in_pairs
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.step_ops import check_post_validation
from megatron.zero_bubble.schedule.streams import check_streams

_Rows = dict[tuple[OpKind, int], list[int]]
"""(kind, chunk) -> microbatch -> position of the operation in a rank's order; -1 if the rank lacks the operation."""


@paused_collector()
def validate(schedule: Schedule) -> None:
    """Check that a schedule can run and gives correct gradients.

    The check takes time linear in the number of operations. These are the rules of `validate`:

    - A schedule is complete: for every microbatch, every stage runs F once, and runs either BW once or B and W once
      each. A forward-only schedule has no backward. With vocabulary shards, every rank also runs the shard operations
      E, S, T and EW once for every microbatch, and the last rank runs L (loss).
    - Every stage runs F in microbatch order, and makes the gradients of inputs (B, BW) and the gradients of weights (W,
      BW) in microbatch order, so that sums of gradients do not depend on the schedule, bit for bit.
    - An operation runs after the operations of the same rank that make its inputs. If a forward and a backward run as
      one operation (a pair), the pair runs after the operations that make the inputs of the forward and of the
      backward.
    - In a lowered schedule, every tensor for another rank is sent after its computation, and received before its use.
      The sends from one rank to another and the receives of these messages have the same order. All ranks run the
      collectives of vocabulary shards in the same order.
    - A forward that runs in a pair has no recomputation (R), because it keeps its activations.
    - Activations that are copied to the host are copied back, are not recomputed, and do not belong to a forward or a
      backward of a pair.
    - STEP and VALIDATE are at positions that `check_post_validation` allows.
    - The ranks do not deadlock. A lowered schedule does not deadlock on NCCL's streams, neither with one hardware queue
      nor with many.

    Args:
        schedule: schedule with or without communication.

    Raises:
        InvalidSchedule: the schedule breaks a rule of `validate`; the one-line message names the rank and the
            operation.
        Deadlock: some ranks wait for each other forever.
    """
    if schedule.num_microbatches < 1:
        raise InvalidSchedule(f"schedule {schedule.name} has {schedule.num_microbatches} microbatches")
    for rank in range(schedule.num_ranks):
        rows = _rows(schedule, rank)
        _check_complete(schedule, rank, rows)
        _check_order(schedule, rank)
        _check_own_rank(schedule, rank, rows)
        check_pairs(schedule, rank)
        _check_recomputations(schedule, rank)
        check_copies(schedule, rank)
        if schedule.is_lowered:
            _check_messages(schedule, rank, rows)
    if schedule.is_lowered:
        _check_channels(schedule)
        _check_collectives(schedule)
    if schedule.has_post_validation:
        check_post_validation(schedule)
    if schedule.is_lowered:
        check_streams(schedule)
    else:
        simulate(schedule, StageCosts.uniform(schedule.num_stages))


def _rows(schedule: Schedule, rank: int) -> _Rows:
    rows: _Rows = {}
    size = _row_size(schedule, rank)
    for position, op in enumerate(schedule.ops[rank]):
        kind, microbatch, chunk = op
        row = rows.get((kind, chunk))
        if not 0 <= microbatch < schedule.num_microbatches or (row is None and not 0 <= chunk < schedule.num_chunks):
            raise schedule.invalid(
                f"rank {rank} runs {op}, but there are {schedule.num_microbatches} microbatches "
                f"and {schedule.num_chunks} chunks",
            )
        if row is None:
            row = rows[kind, chunk] = [-1] * size
        if microbatch >= size:
            continue
        if row[microbatch] >= 0:
            raise schedule.invalid(f"rank {rank} runs {op} twice")
        row[microbatch] = position
    return rows


def _row_size(schedule: Schedule, rank: int) -> int:
    """The number of microbatches, from the first on, for which `_rows` records positions.

    If a rank has n operations, at least one of its first n + 1 microbatches has no operation. These microbatches
    therefore suffice to find a missing operation.
    """
    return min(schedule.num_microbatches, 1 + len(schedule.ops[rank]))


_IN_ORDER = tuple(kind for kind, facts in KINDS.items() if facts.in_order)
"""The results that a stage must make once for each microbatch, in microbatch order."""


_MADE_IN_ORDER = {
    kind: tuple(result for result in facts.makes if KINDS[result].in_order) for kind, facts in KINDS.items()
}
"""Kind of operation -> the operation's results that must be made in microbatch order."""
_MAKERS = {
    result: sorted((kind for kind in KINDS if result in KINDS[kind].makes), key=lambda kind: -len(KINDS[kind].makes))
    for result in KINDS
}
"""Result -> kinds of operations that make the result; kinds of operations that make several results come first."""


def _check_complete(schedule: Schedule, rank: int, rows: _Rows) -> None:
    for chunk in range(schedule.num_chunks):
        results = _expected(schedule, rank, chunk)
        makers = {result: [kind for kind in _MAKERS[result] if (kind, chunk) in rows] for result in results}
        if any(len(kinds) != 1 or -1 in rows[kinds[0], chunk] for kinds in makers.values()):
            for microbatch, result in product(range(_row_size(schedule, rank)), results):
                kinds = [kind for kind in makers[result] if rows[kind, chunk][microbatch] >= 0]
                if not kinds:
                    raise schedule.invalid(f"rank {rank} lacks {Op(result, microbatch, chunk)}")
                if len(kinds) > 1:
                    ops = (Op(kind, microbatch, chunk) for kind in kinds)
                    raise schedule.invalid(f"rank {rank} runs {' and also '.join(map(str, ops))}")
        for kind, other in rows:
            if other == chunk and kind in VOCABULARY and kind not in results:
                op = next(op for op in schedule.ops[rank] if (op.kind, op.chunk) == (kind, chunk))
                raise schedule.invalid(f"rank {rank} runs {op}, which belongs to another rank or chunk")


def _expected(schedule: Schedule, rank: int, chunk: int) -> list[OpKind]:
    """The results that `chunk` of `rank` must make for every microbatch."""
    first, is_forward_only = Op(OpKind.F, 0, chunk), schedule.kinds <= FORWARDS | COMMUNICATION
    return [
        result
        for result in _IN_ORDER
        if (schedule.is_vocabulary_parallel or result not in VOCABULARY)
        and is_at(schedule.placement, rank, first, KINDS[result].runs_on)
        and not (is_forward_only and KINDS[result].adds_gradient)
    ]


def _check_order(schedule: Schedule, rank: int) -> None:
    last: dict[tuple[OpKind, int], Op] = {}
    for op in schedule.ops[rank]:
        kind, microbatch, chunk = op
        for result in _MADE_IN_ORDER[kind]:
            before = last.get((result, chunk))
            if before is not None and before.microbatch > microbatch:
                raise schedule.invalid(
                    f"rank {rank} runs {op} after {before}: {KINDS[result].in_order} of a stage go in microbatch order"
                )
            last[result, chunk] = op


def _check_own_rank(schedule: Schedule, rank: int, rows: _Rows) -> None:
    """Check that every operation runs after the operations of the same rank that make its inputs."""
    placement = schedule.placement
    for (kind, chunk), row in rows.items():
        if kind in COMMUNICATION:
            continue
        for need, stage, is_remote, _ in sources(placement, kind, placement.stage_of(rank, chunk)):
            if is_remote:
                continue
            makers = [(maker, placement.chunk_of(stage)) for maker in _MAKERS[need.result]]
            positions = _merged([rows[maker] for maker in makers if maker in rows], schedule.num_microbatches)
            for microbatch, position in enumerate(row):
                needed = microbatch - need.num_before
                if position < 0 or needed < 0 or 0 <= positions[needed] < position - (kind in PAIRED):
                    continue
                op = Op(kind, microbatch, chunk)
                if positions[needed] >= 0:
                    raise schedule.invalid(
                        f"rank {rank} runs {op} before {schedule.ops[rank][positions[needed]]}, which it needs"
                    )
                if not need.is_optional:
                    maker, its_chunk = makers[-1]
                    raise schedule.invalid(f"rank {rank} lacks {Op(maker, needed, its_chunk)} for {op}")


def _merged(rows: Sequence[Sequence[int]], num_microbatches: int) -> Sequence[int]:
    """Merge lists of positions: for each microbatch, take the first position that is not -1 (no operation)."""
    if len(rows) == 1:
        return rows[0]
    return [next((row[k] for row in rows if row[k] >= 0), -1) for k in range(num_microbatches)]


def _check_recomputations(schedule: Schedule, rank: int) -> None:
    """Check that no R belongs to a forward that runs in a pair."""
    in_pairs = forwards_in_pairs(schedule, rank)
    for op in schedule.ops[rank] if in_pairs else ():
        if op.kind is OpKind.R and (forward := op._replace(kind=OpKind.F)) in in_pairs:
            raise schedule.invalid(f"rank {rank} runs {op}, but {forward} runs in a pair, which keeps its activations")


def _check_messages(schedule: Schedule, rank: int, rows: _Rows) -> None:
    """Check that `rank` receives each remote input before the input is used, and sends each result after its
    computation."""
    placement, none = schedule.placement, [-1] * schedule.num_microbatches
    unused = {key: list(row) for key, row in rows.items() if key[0] in COMMUNICATION}
    for (kind, chunk), row in rows.items():
        if kind in COMMUNICATION:
            continue
        first = Op(kind, 0, chunk)
        incoming = (receive_before(placement, rank, first), exchange_before(schedule, rank, first))
        outgoing = (send_after(placement, rank, first), *exchanges_after(schedule, rank, first))
        for message, is_before in (*((each, True) for each in incoming), *((each, False) for each in outgoing)):
            if message is None:
                continue
            key = message.kind, message.chunk
            places, left = rows.get(key, none), unused.get(key, none)
            for microbatch, (position, place) in enumerate(zip(row, places, strict=True)):
                if position < 0:
                    continue
                if place < 0 or (place < position) != is_before:
                    op, message = first._replace(microbatch=microbatch), message._replace(microbatch=microbatch)
                    if place < 0:
                        raise schedule.invalid(f"rank {rank} lacks {message} for {op}")
                    if is_before:
                        raise schedule.invalid(f"rank {rank} runs {op} before {message}, which it needs")
                    raise schedule.invalid(f"rank {rank} runs {message} before {op}, which makes the tensor")
                left[microbatch] = -1
    for kind in collective_kinds(schedule):
        row = rows.get((kind, 0), none)
        if -1 in row:
            raise schedule.invalid(f"rank {rank} lacks {Op(kind, row.index(-1))}, in which all ranks take part")
        unused.pop((kind, 0), None)
    left_over = [
        Op(kind, microbatch, chunk)
        for (kind, chunk), row in unused.items()
        for microbatch, position in enumerate(row)
        if position >= 0
    ]
    if left_over:
        raise schedule.invalid(f"rank {rank} runs {min(left_over)}, but no operation needs or makes this message")


def _check_collectives(schedule: Schedule) -> None:
    """Check that all ranks run the collectives in the same order."""
    first, *others = ([op for op in ops if op.kind in COLLECTIVES] for ops in schedule.ops)
    for rank, collectives in enumerate(others, 1):
        for expected, collective in zip(first, collectives, strict=True):
            if collective != expected:
                raise schedule.invalid(
                    f"rank {rank} runs {collective} where rank 0 runs {expected}: "
                    f"collectives must have the same order on all ranks",
                )


def _check_channels(schedule: Schedule) -> None:
    """Check that the k-th send and the k-th receive of every channel belong to the same message."""
    placement = schedule.placement
    received: dict[tuple[int, int], list[Op]] = defaultdict(list)
    for rank, ops in enumerate(schedule.ops):
        receives = [op for op in ops if op.kind in RECEIVES]
        peers = per_kind(receives, partial(placement.peer_of, rank))
        for receive in receives:
            received[peers[receive.kind, receive.chunk], rank].append(receive)
    next_receives = {channel: iter(receives) for channel, receives in received.items()}
    for source, ops in enumerate(schedule.ops):
        sends = [op for op in ops if op.kind in SENDS]
        ends = per_kind(sends, partial(other_end, placement, source))
        for send in sends:
            destination, expected = ends[send.kind, send.chunk]
            receive = next(next_receives[source, destination])
            if receive != (expected.kind, send.microbatch, expected.chunk):
                raise schedule.invalid(
                    f"rank {source} runs {send} where rank {destination} runs {receive}: "
                    f"the messages of a channel must have the same order at both ends",
                )
