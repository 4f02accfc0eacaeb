"""Schedule -> Schedule with communication: the pass that adds sends and receives."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from megatron.zero_bubble.schedule.errors import InvalidSchedule, ScheduleError
from megatron.zero_bubble.schedule.ir import Op, OpKind, Schedule
from megatron.zero_bubble.schedule.messages import other_end, receive_before, send_after

RECEIVE_AHEAD = 2
"""How many compute operations before its consumer a receive is posted, unless told otherwise."""


class _Message(NamedTuple):
    """One tensor on its way: the operation that the receiver posts, and the position of the consumer."""

    receive: Op
    consumer: int


def lower(schedule: Schedule, receive_ahead: int = RECEIVE_AHEAD) -> Schedule:
    """The same schedule with the operations that move tensors between ranks.

    Every ordered pair of ranks (source, destination) is one channel, which carries activations and
    gradients alike. A send stands right after the operation that makes the tensor. The receives of a
    channel stand in exactly the order in which the source sends on it; each is posted before the
    compute operation that stands `receive_ahead` compute operations before its consumer, and earlier only
    where the order of its channel forces it. A receive whose consumer stands after a VALIDATE is not posted
    before it either: where the validation fails, messages come once more. Neighbouring stages on one rank
    exchange no message.

    A receive is only *posted* where it stands, and the wait is at its consumer: hence the lowered schedule
    deadlocks only if the schedule itself does. Lowering is idempotent: communication that is already
    there is dropped and placed anew. Raises `InvalidSchedule` if a tensor has no consumer, or none makes it.
    """
    if receive_ahead < 0:
        raise ScheduleError(f"receive_ahead must not be negative, got {receive_ahead}")
    schedule = schedule.without_communication()
    channels = _channels(schedule)
    ops = tuple(_lower_rank(schedule, rank, channels[rank], receive_ahead) for rank in range(schedule.num_ranks))
    return replace(schedule, ops=ops)


def _channels(schedule: Schedule) -> list[dict[int, list[_Message]]]:
    """For every destination rank: source rank -> the messages of that channel, in the order of sending."""
    placement = schedule.placement
    consumers: list[dict[Op, int]] = [{} for _ in schedule.ops]
    for rank, ops in enumerate(schedule.ops):
        for position, op in enumerate(ops):
            receive = receive_before(placement, rank, op)
            if receive is not None:
                consumers[rank][receive] = position
    channels: list[dict[int, list[_Message]]] = [defaultdict(list) for _ in schedule.ops]
    for source, ops in enumerate(schedule.ops):
        for op in ops:
            send = send_after(placement, source, op)
            if send is None:
                continue
            destination, receive = other_end(placement, source, send)
            consumer = consumers[destination].pop(receive, None)
            if consumer is None:
                raise InvalidSchedule(
                    f"schedule {schedule.name}: rank {source} makes {op}, but rank {destination} never uses it"
                )
            channels[destination][source].append(_Message(receive, consumer))
    _check_all_made(schedule, consumers)
    return channels


def _check_all_made(schedule: Schedule, unmatched: list[dict[Op, int]]) -> None:
    for rank, receives in enumerate(unmatched):
        for receive, position in receives.items():
            raise InvalidSchedule(
                f"schedule {schedule.name}: rank {rank} needs {receive} for {schedule.ops[rank][position]}, "
                f"but rank {schedule.placement.peer_of(rank, receive)} never makes it"
            )


def _lower_rank(
    schedule: Schedule, rank: int, incoming: dict[int, list[_Message]], receive_ahead: int
) -> tuple[Op, ...]:
    """The operations of `rank` with its receives and sends."""
    posted_before: dict[int, list[Op]] = defaultdict(list)
    barriers = [0] + [position + 1 for position, op in enumerate(schedule.ops[rank]) if op.kind is OpKind.VALIDATE]
    for source in sorted(incoming):
        latest = len(schedule.ops[rank])
        positions = []
        for message in reversed(incoming[source]):
            barrier = max(position for position in barriers if position <= message.consumer)
            latest = min(latest, max(barrier, message.consumer - receive_ahead))
            positions.append(latest)
        for position, message in zip(reversed(positions), incoming[source], strict=True):
            posted_before[position].append(message.receive)
    lowered: list[Op] = []
    for position, op in enumerate(schedule.ops[rank]):
        lowered += posted_before.get(position, ())
        lowered.append(op)
        send = send_after(schedule.placement, rank, op)
        if send is not None:
            lowered.append(send)
    return tuple(lowered)
