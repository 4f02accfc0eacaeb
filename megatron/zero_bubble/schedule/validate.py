"""Proves that a schedule is complete, runs to its end, and adds gradients up in microbatch order."""

from __future__ import annotations

from collections import defaultdict, deque

from megatron.zero_bubble.schedule.collector import paused_collector
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import InvalidSchedule
from megatron.zero_bubble.schedule.graph import (
    collective_kinds,
    dependencies,
    exchange_before,
    exchanges_after,
    other_end,
    receive_before,
    send_after,
)
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import (
    COLLECTIVES,
    COMMUNICATION,
    FORWARDS,
    KINDS,
    RECEIVES,
    SENDS,
    VOCABULARY,
    OpKind,
    Place,
)
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.step_ops import check_post_validation
from megatron.zero_bubble.schedule.streams import check_streams

_Positions = list[dict[Op, int]]
"""For every rank, where each of its operations stands."""


@paused_collector()
def validate(schedule: Schedule) -> None:
    """Raise `InvalidSchedule` or `Deadlock`, in one line that names rank and operation, unless all of this holds:

    - Complete: every stage runs every microbatch once: F, and either BW or both B and W; or no
      backward at all (a forward-only schedule). Where the vocabulary is spread over the ranks, so does every rank
      E, S, T and EW, and the last one L.
    - In microbatch order on every stage: F; the gradients of inputs (B, BW); the gradients of weights
      (W, BW). Sums of gradients depend on the last, bit for bit.
    - What an operation needs from its own rank stands before it.
    - In a lowered schedule: every tensor that leaves a rank is sent, after it was made, and received
      before it is used; the k-th send of a channel and its k-th receive name the same message. The same holds for
      the collectives of vocabulary shards, each of which has an end on every rank.
    - With post-validation: what `check_post_validation` says.
    - Replayed with ranks that run their operations in order, every rank reaches its end: in a lowered schedule
      on NCCL's streams, with one hardware queue and with many.

    Time is linear in the number of operations.
    """
    if schedule.num_microbatches < 1:
        raise InvalidSchedule(f"schedule {schedule.name} has {schedule.num_microbatches} microbatches")
    positions = [_positions(schedule, rank) for rank in range(schedule.num_ranks)]
    _check_complete(schedule, positions)
    _check_order(schedule)
    _check_own_rank(schedule, positions)
    if schedule.is_lowered:
        _check_messages(schedule, positions)
        _check_channels(schedule)
        _check_collectives(schedule)
    if schedule.has_post_validation:
        check_post_validation(schedule)
    if schedule.is_lowered:
        check_streams(schedule)
    else:
        simulate(schedule, StageCosts.uniform(schedule.num_stages))


def _positions(schedule: Schedule, rank: int) -> dict[Op, int]:
    positions: dict[Op, int] = {}
    for position, op in enumerate(schedule.ops[rank]):
        if not 0 <= op.microbatch < schedule.num_microbatches or not 0 <= op.chunk < schedule.num_chunks:
            raise schedule.invalid(
                f"rank {rank} runs {op}, but there are {schedule.num_microbatches} microbatches "
                f"and {schedule.num_chunks} chunks",
            )
        if op in positions:
            raise schedule.invalid(f"rank {rank} runs {op} twice")
        positions[op] = position
    return positions


_IN_ORDER = tuple(kind for kind, facts in KINDS.items() if facts.in_order)
"""The results that are made once for each microbatch, in microbatch order."""


def _makers(result: OpKind) -> tuple[OpKind, ...]:
    makers = [kind for kind, facts in KINDS.items() if result in facts.makes]
    return tuple(sorted(makers, key=lambda kind: len(KINDS[kind].makes), reverse=True))


_MAKERS = {result: _makers(result) for result in KINDS}
"""For every result, the kinds of operation that make it, those that make more than that first."""


def _check_complete(schedule: Schedule, positions: _Positions) -> None:
    for rank, here in enumerate(positions):
        for chunk in range(schedule.num_chunks):
            results = _expected(schedule, rank, chunk)
            for microbatch in range(schedule.num_microbatches):
                for result in results:
                    ops = [op for kind in _MAKERS[result] if (op := Op(kind, microbatch, chunk)) in here]
                    if not ops:
                        raise schedule.invalid(f"rank {rank} lacks {Op(result, microbatch, chunk)}")
                    if len(ops) > 1:
                        raise schedule.invalid(f"rank {rank} runs {ops[0]} and also {ops[1]}")
            for op in here:
                if op.chunk == chunk and op.kind in VOCABULARY and op.kind not in results:
                    raise schedule.invalid(f"rank {rank} runs {op}, which has no place there")


def _expected(schedule: Schedule, rank: int, chunk: int) -> list[OpKind]:
    """The results that `chunk` of `rank` has to make for every microbatch."""
    placement = schedule.placement
    places = {Place.SAME_STAGE}
    if schedule.is_vocabulary_parallel and chunk == 0:
        is_last = rank == placement.rank_of(placement.num_stages - 1)
        places |= {Place.ALL_RANKS, *[Place.LAST_RANK] * is_last}
    is_forward_only = schedule.kinds <= FORWARDS | COMMUNICATION
    return [
        result
        for result in _IN_ORDER
        if KINDS[result].runs_on in places and not (is_forward_only and KINDS[result].adds_gradient)
    ]


def _check_order(schedule: Schedule) -> None:
    for rank, ops in enumerate(schedule.ops):
        last: dict[tuple[OpKind, int], Op] = {}
        for op in ops:
            for result in KINDS[op.kind].makes:
                what = KINDS[result].in_order
                before = last.get((result, op.chunk))
                if what and before is not None and before.microbatch > op.microbatch:
                    raise schedule.invalid(
                        f"rank {rank} runs {op} after {before}: {what} of a stage go in microbatch order"
                    )
                last[result, op.chunk] = op


def _check_own_rank(schedule: Schedule, positions: _Positions) -> None:
    """What an operation needs from its own rank stands before it."""
    placement = schedule.placement
    for rank, here in enumerate(positions):
        for op, position in here.items():
            if op.kind in COMMUNICATION:
                continue
            for result, stage, microbatch in dependencies(schedule, rank, op):
                if placement.rank_of(stage) != rank:
                    continue
                makers = [Op(kind, microbatch, placement.chunk_of(stage)) for kind in _MAKERS[result]]
                needed = next((maker for maker in makers if maker in here), None)
                if needed is None:
                    raise schedule.invalid(f"rank {rank} lacks {makers[-1]} for {op}")
                if here[needed] > position:
                    raise schedule.invalid(f"rank {rank} runs {op} before {needed}, which it needs")


def _check_messages(schedule: Schedule, positions: _Positions) -> None:
    """Every tensor that enters or leaves a rank has its receive or send, on the right side of the operation."""
    placement = schedule.placement
    for rank, here in enumerate(positions):
        unused = {op for op in here if op.kind in COMMUNICATION}
        for op, position in here.items():
            if op.kind in COMMUNICATION:
                continue
            brings = (receive_before(placement, rank, op), exchange_before(schedule, rank, op))
            carries = (send_after(placement, rank, op), *exchanges_after(schedule, rank, op))
            for message in (*brings, *carries):
                if message is not None and message not in here:
                    raise schedule.invalid(f"rank {rank} lacks {message} for {op}")
            for message in brings:
                if message is not None and here[message] > position:
                    raise schedule.invalid(f"rank {rank} runs {op} before {message}, which it needs")
            for message in carries:
                if message is not None and here[message] < position:
                    raise schedule.invalid(f"rank {rank} runs {message} before {op}, which makes the tensor")
            unused.difference_update(brings, carries)
        for kind in collective_kinds(schedule):
            for microbatch in range(schedule.num_microbatches):
                if Op(kind, microbatch) not in here:
                    raise schedule.invalid(f"rank {rank} lacks {Op(kind, microbatch)}, in which all ranks take part")
                unused.discard(Op(kind, microbatch))
        if unused:
            raise schedule.invalid(f"rank {rank} runs {min(unused)}, but no such message enters or leaves it")


def _check_collectives(schedule: Schedule) -> None:
    """All ranks run their collectives in one order."""
    first, *others = ([op for op in ops if op.kind in COLLECTIVES] for ops in schedule.ops)
    for rank, collectives in enumerate(others, 1):
        for expected, collective in zip(first, collectives, strict=True):
            if collective != expected:
                raise schedule.invalid(
                    f"rank {rank} runs {collective} where rank 0 runs {expected}: "
                    f"collectives must have the same order on all ranks",
                )


def _check_channels(schedule: Schedule) -> None:
    """The k-th send of every channel and its k-th receive name the same message."""
    placement = schedule.placement
    received: dict[tuple[int, int], deque[Op]] = defaultdict(deque)
    for rank, ops in enumerate(schedule.ops):
        for op in ops:
            if op.kind in RECEIVES:
                received[placement.peer_of(rank, op), rank].append(op)
    for source, ops in enumerate(schedule.ops):
        for send in ops:
            if send.kind not in SENDS:
                continue
            destination, expected = other_end(placement, source, send)
            receive = received[source, destination].popleft()
            if receive != expected:
                raise schedule.invalid(
                    f"rank {source} runs {send} where rank {destination} runs {receive}: "
                    f"the messages of a channel must have the same order at both ends",
                )
