"""Proves that a schedule can run, and gives the numbers it should: `validate`."""

from __future__ import annotations

from collections import defaultdict, deque

from megatron.zero_bubble.schedule.errors import InvalidSchedule
from megatron.zero_bubble.schedule.ir import (
    BACKWARDS,
    COMMUNICATION,
    RECEIVES,
    SENDS,
    SPLIT_WEIGHT_GRADIENTS,
    Op,
    OpKind,
    Schedule,
)
from megatron.zero_bubble.schedule.messages import other_end, receive_before, send_after
from megatron.zero_bubble.schedule.replay import dependencies, replay
from megatron.zero_bubble.schedule.step_ops import check_post_validation
from megatron.zero_bubble.schedule.streams import check_streams

_Positions = list[dict[Op, int]]
"""For every rank, where each of its operations stands."""


def validate(schedule: Schedule) -> None:
    """Raise `InvalidSchedule` or `Deadlock`, in one line that names rank and operation, unless all of this holds:

    - Complete: every stage runs every microbatch once: F, and either BW or both B and W; or no
      backward at all (a forward-only schedule).
    - In microbatch order on every stage: F; the gradients of inputs (B, BW); the gradients of weights
      (W, BW). Sums of gradients depend on the last, bit for bit.
    - What an operation needs from its own rank stands before it.
    - In a lowered schedule: every tensor that leaves a rank is sent, after it was made, and received
      before it is used; the k-th send of a channel and its k-th receive name the same message.
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
    if schedule.has_post_validation:
        check_post_validation(schedule)
    if schedule.is_lowered:
        check_streams(schedule)
    else:
        for _ in replay(schedule):
            pass


def _fail(schedule: Schedule, problem: str) -> InvalidSchedule:
    return InvalidSchedule(f"schedule {schedule.name}: {problem}")


def _positions(schedule: Schedule, rank: int) -> dict[Op, int]:
    positions: dict[Op, int] = {}
    for position, op in enumerate(schedule.ops[rank]):
        if not 0 <= op.microbatch < schedule.num_microbatches or not 0 <= op.chunk < schedule.num_chunks:
            raise _fail(
                schedule,
                f"rank {rank} runs {op}, but there are {schedule.num_microbatches} microbatches "
                f"and {schedule.num_chunks} chunks",
            )
        if op in positions:
            raise _fail(schedule, f"rank {rank} runs {op} twice")
        positions[op] = position
    return positions


def _check_complete(schedule: Schedule, positions: _Positions) -> None:
    forward_only = all(op.kind is OpKind.F or op.kind in COMMUNICATION for rank_ops in schedule.ops for op in rank_ops)
    for rank, here in enumerate(positions):
        for chunk in range(schedule.num_chunks):
            for microbatch in range(schedule.num_microbatches):
                if Op(OpKind.F, microbatch, chunk) not in here:
                    raise _fail(schedule, f"rank {rank} lacks {Op(OpKind.F, microbatch, chunk)}")
                if forward_only:
                    continue
                fused, b, w = (Op(kind, microbatch, chunk) for kind in (OpKind.BW, OpKind.B, OpKind.W))
                in_tail = w._replace(kind=OpKind.W_TAIL)
                if in_tail in here:
                    if w in here:
                        raise _fail(schedule, f"rank {rank} runs {in_tail} and also {w}")
                    w = in_tail
                if fused in here:
                    if b in here or w in here:
                        raise _fail(schedule, f"rank {rank} runs {fused} and also {b if b in here else w}")
                elif b not in here:
                    raise _fail(schedule, f"rank {rank} lacks {b}")
                elif w not in here:
                    raise _fail(schedule, f"rank {rank} lacks {w}")


_IN_ORDER: tuple[tuple[frozenset[OpKind], str], ...] = (
    (frozenset({OpKind.F}), "forwards"),
    (BACKWARDS, "gradients of inputs"),
    (SPLIT_WEIGHT_GRADIENTS | {OpKind.BW}, "gradients of weights"),
)


def _check_order(schedule: Schedule) -> None:
    for rank, ops in enumerate(schedule.ops):
        last: dict[tuple[str, int], Op] = {}
        for op in ops:
            for kinds, what in _IN_ORDER:
                if op.kind not in kinds:
                    continue
                before = last.get((what, op.chunk))
                if before is not None and before.microbatch > op.microbatch:
                    raise _fail(
                        schedule, f"rank {rank} runs {op} after {before}: {what} of a stage go in microbatch order"
                    )
                last[what, op.chunk] = op


def _check_own_rank(schedule: Schedule, positions: _Positions) -> None:
    """What an operation needs from its own rank stands before it."""
    placement = schedule.placement
    for rank, here in enumerate(positions):
        for op, position in here.items():
            if op.kind in COMMUNICATION:
                continue
            for kind, stage, microbatch in dependencies(
                placement, op.kind, placement.stage_of(rank, op.chunk), op.microbatch
            ):
                if placement.rank_of(stage) != rank:
                    continue
                needed = Op(kind, microbatch, placement.chunk_of(stage))
                if needed not in here:
                    needed = Op(OpKind.BW, microbatch, needed.chunk)
                if here[needed] > position:
                    raise _fail(schedule, f"rank {rank} runs {op} before {needed}, which it needs")


def _check_messages(schedule: Schedule, positions: _Positions) -> None:
    """Every tensor that enters or leaves a rank has its receive or send, on the right side of the operation."""
    placement = schedule.placement
    for rank, here in enumerate(positions):
        unused = {op for op in here if op.kind in COMMUNICATION}
        for op, position in here.items():
            if op.kind in COMMUNICATION:
                continue
            receive, send = receive_before(placement, rank, op), send_after(placement, rank, op)
            for message in (receive, send):
                if message is not None and message not in here:
                    raise _fail(schedule, f"rank {rank} lacks {message} for {op}")
                unused.discard(message)
            if receive is not None and here[receive] > position:
                raise _fail(schedule, f"rank {rank} runs {op} before {receive}, which it needs")
            if send is not None and here[send] < position:
                raise _fail(schedule, f"rank {rank} runs {send} before {op}, which makes the tensor")
        if unused:
            raise _fail(schedule, f"rank {rank} runs {min(unused)}, but no such message enters or leaves it")


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
                raise _fail(
                    schedule,
                    f"rank {source} runs {send} where rank {destination} runs {receive}: "
                    f"the messages of a channel must stand in the same order at both ends",
                )
