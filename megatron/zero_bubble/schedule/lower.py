"""Lowering: the pass that adds sends, receives and collectives to a schedule."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from typing import NamedTuple

from megatron.zero_bubble.schedule.collector import paused_collector
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Deadlock, ScheduleError
from megatron.zero_bubble.schedule.graph import message_time, other_end, per_kind, receive_before, send_after
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.lower_collectives import PlacedCollective, place_collectives
from megatron.zero_bubble.schedule.pairs import computations, numbered
from megatron.zero_bubble.schedule.serial_order import SerialOrder, unit_costs
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.streams import HardwareQueues

RECEIVE_AHEAD = 1
"""Default number of computations between the posting of a receive and the consumer of the received tensor."""
_NEGLIGIBLE = 0.001
"""Relative increase of the makespan by NCCL's streams above which `lower` tries other places for receives."""


@paused_collector()
def lower(schedule: Schedule, receive_ahead: int = RECEIVE_AHEAD, costs: StageCosts | None = None) -> Schedule:
    """Add sends, receives and collectives to a schedule, in an order that NCCL can run.

    Every ordered pair of ranks (source, destination) has a channel for activations and gradients. A send comes right
    after the operation that makes the tensor. The receives of a channel are posted in the order of the channel's sends.
    A receive does not wait for its message; instead, the operation that uses the tensor waits for the message.
    Neighbouring stages on the same rank need no message. All ranks run the collectives of vocabulary shards in the same
    order (see `place_collectives`).

    A receive is posted `receive_ahead` computations before its consumer. If the consumers of a channel's messages run
    in a different order from the sends, some receives are posted more than `receive_ahead` computations before their
    consumers, so that the receives have the order of the sends. On GPUs with one hardware queue (see `streams`),
    receives that are posted `receive_ahead` computations before their consumers may cause a deadlock or a longer
    makespan. If a simulation with one hardware queue deadlocks, or its makespan is longer than in a simulation without
    NCCL's streams, `lower` also tries a second rule for the places of receives, `_between_makers`, which excludes
    deadlocks. Of all tried schedules, `lower` returns the schedule with the shortest makespan on GPUs with one hardware
    queue. A lowered schedule deadlocks only if the schedule deadlocks even without communication.

    If the sender sends a message after its VALIDATE (post-validation), the receiver posts the receive after its own
    VALIDATE of the same iteration. If the validation fails, the ranks repeat only the messages that were sent before
    the sender's VALIDATE.

    Lowering is idempotent, because `lower` first removes existing communication.

    Args:
        schedule: schedule with or without communication.
        receive_ahead: number of computations between a receive and the consumer of the received tensor.
        costs: costs of the stages; by default `unit_costs`.

    Returns:
        The given schedule with communication.

    Raises:
        InvalidSchedule: a tensor has no consumer or no producer.
        Deadlock: the ranks deadlock even without communication.
        ScheduleError: schedule and costs have different numbers of stages, or `receive_ahead` is negative.
    """
    if receive_ahead < 0:
        raise ScheduleError(f"receive_ahead must not be negative, got {receive_ahead}")
    schedule = schedule.without_communication()
    costs = costs or unit_costs(schedule.num_stages)
    schedule.require_stages(costs.num_stages)
    channels = _channels(schedule, costs)
    timeline = simulate(schedule, costs)
    order = SerialOrder(timeline)
    collectives = place_collectives(schedule, order, costs)
    places = [_ahead(channel, order, receive_ahead) for channel in channels]
    ahead = _with_communication(schedule, channels, places, collectives)
    time = _time_with_one_queue(ahead, costs)
    if time <= (1 + _NEGLIGIBLE) * timeline.makespan:
        return ahead
    places = [_between_makers(channel, order, receive_ahead) for channel in channels]
    between = _with_communication(schedule, channels, places, collectives)
    return between if _time_with_one_queue(between, costs) < time else ahead


class _Message(NamedTuple):
    """One tensor that is sent from one rank to another."""

    send: Op
    maker: int
    """Position, on the source rank, of the computation that makes the tensor."""
    receive: Op
    consumer: int
    """Position, on the destination rank, of the computation that uses the tensor."""
    time: float


class _Channel(NamedTuple):
    """The messages from one rank to another, in the order of sending."""

    source: int
    destination: int
    messages: Sequence[_Message]


class _Place(NamedTuple):
    """The place of a receive among the operations of its rank."""

    before: int
    """Position of the computation right before which the receive is posted."""
    turn: int
    """Index, in the serial order, of the computation that makes the previous message of the channel; -1 for the first
    message. Receives with the same `before` are posted in ascending order of `turn`."""


def _channels(schedule: Schedule, costs: StageCosts) -> list[_Channel]:
    placement = schedule.placement
    consumers: list[dict[Op, int]] = [{} for _ in schedule.ops]
    for rank, ops in enumerate(schedule.ops):
        receives = per_kind(ops, partial(receive_before, placement, rank))
        for position, (kind, microbatch, chunk) in numbered(ops):
            receive = receives[kind, chunk]
            if receive is not None:
                consumers[rank][Op(receive.kind, microbatch, chunk)] = position
    messages: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for source, ops in enumerate(schedule.ops):
        routes = per_kind(ops, partial(_route, placement, costs, source))
        for maker, (kind, microbatch, chunk) in numbered(ops):
            route = routes[kind, chunk]
            if route is None:
                continue
            send, destination, (receive_kind, _, receive_chunk), time = route
            receive = Op(receive_kind, microbatch, receive_chunk)
            consumer = consumers[destination].pop(receive, None)
            if consumer is None:
                op = Op(kind, microbatch, chunk)
                raise schedule.invalid(f"rank {source} makes {op}, but rank {destination} never uses it")
            message = _Message(Op(send.kind, microbatch, chunk), maker, receive, consumer, time)
            messages[source, destination].append(message)
    for rank, unmatched in enumerate(consumers):
        for receive, position in unmatched.items():
            users = (op for place, op in numbered(schedule.ops[rank]) if place == position and op[1:] == receive[1:])
            raise schedule.invalid(
                f"rank {rank} needs {receive} for {next(users)}, "
                f"but rank {placement.peer_of(rank, receive)} never makes it"
            )
    return [_Channel(*ends, messages[ends]) for ends in sorted(messages)]


def _route(placement: Placement, costs: StageCosts, source: int, op: Op) -> tuple[Op, int, Op, float] | None:
    """(send, destination rank, receive, time) of the message that `source` sends after `op`; None without a message."""
    send = send_after(placement, source, op)
    if send is None:
        return None
    return send, *other_end(placement, source, send), message_time(placement, costs, source, send)


def _with_communication(
    schedule: Schedule,
    channels: Sequence[_Channel],
    places: Sequence[Sequence[_Place]],
    collectives: Sequence[PlacedCollective],
) -> Schedule:
    """Insert sends right after the operations that make their tensors, and receives and collectives at their places."""
    inserted: list[list[tuple[int, int, int, int, int, Op]]] = [[] for _ in schedule.ops]
    """Rank -> operations to insert: (position of the computation that follows, sort keys, operation)."""
    for (source, destination, messages), channel_places in zip(channels, places, strict=True):
        for number, (message, (before, turn)) in enumerate(zip(messages, channel_places, strict=True)):
            inserted[source].append((message.maker + 1, -2, 0, destination, number, message.send))
            inserted[destination].append((before, turn, 1, source, number, message.receive))
    for number, collective in enumerate(collectives):
        for here, before in zip(inserted, collective.before, strict=True):
            here.append((before, collective.turn, 0, 0, number, collective.op))
    ops = []
    for lane, communication in zip(schedule.ops, inserted, strict=True):
        computed = list(computations(lane))
        lowered: list[Op] = []
        done = 0
        communication.sort()
        for before, *_, op in communication:
            if before > done:
                lowered += chain.from_iterable(computed[done:before])
                done = before
            lowered.append(op)
        ops.append((*lowered, *chain.from_iterable(computed[done:])))
    return replace(schedule, ops=tuple(ops))


def _turns(channel: _Channel, order: SerialOrder) -> list[int]:
    """Message of `channel` -> position in `order` of the computation that makes the previous message; -1 if none."""
    return [-1, *(order.numbers[channel.source][message.maker] for message in channel.messages[:-1])]


def _ahead(channel: _Channel, order: SerialOrder, receive_ahead: int) -> list[_Place]:
    """Place each receive `receive_ahead` computations before its consumer (see `lower`), but not before a VALIDATE."""
    phases = order.phases[channel.destination]
    places: list[_Place] = []
    for message, turn in reversed(list(zip(channel.messages, _turns(channel, order), strict=True))):
        before = max(phases.starts[phases.of(message.consumer)], message.consumer - receive_ahead)
        places.append(_Place(min(before, places[-1].before) if places else before, turn))
    return places[::-1]


def _between_makers(channel: _Channel, order: SerialOrder, receive_ahead: int) -> list[_Place]:
    """Place the receives of a channel so that ranks cannot deadlock, however long the operations take.

    As proof, consider a run of all computations, one at a time, in the serial order `order`. A receive is posted after
    the computation that makes the previous message of its channel, so that the receive blocks no launch of its own
    rank. A receive is posted before the computation that makes the next message of its channel, because the send of the
    next message waits for the receive. By induction, each channel has at most one incomplete message when a computation
    of this run starts. The incomplete message is the last message that was posted on the channel. Therefore, when a
    computation starts, no earlier launch of the same rank still waits.

    The preferred place of a receive is `receive_ahead` computations before its consumer. If the rank reaches the
    preferred place while the previous message of the channel is in flight, the receive is posted later. If a receive at
    the preferred place would delay the consumer of the tensor or the next message of the channel, the receive is posted
    earlier.
    """
    source, rank, messages = channel
    starts, ends = order.starts[rank], order.ends[rank]
    turns = _turns(channel, order)
    places: list[_Place] = []
    for k, message in reversed(list(enumerate(messages))):
        first, undisturbed = order.phases[rank].starts[order.phases[source].of(message.maker)], 0
        if k > 0:
            sent = order.ends[source][messages[k - 1].maker]
            undisturbed = max(order.num_before(rank, turns[k]), bisect_left(starts, sent + messages[k - 1].time))
        last, due = message.consumer, starts[message.consumer]
        if places:
            next_maker = messages[k + 1].maker
            last = min(last, places[-1].before, order.num_before(rank, order.numbers[source][next_maker]))
            due = min(due, order.ends[source][next_maker])
        in_time = bisect_right(ends, due - message.time)
        preferred = max(min(message.consumer - receive_ahead, in_time), undisturbed)
        places.append(_Place(min(max(preferred, first), last), turns[k]))
    return places[::-1]


def _time_with_one_queue(lowered: Schedule, costs: StageCosts) -> float:
    """The makespan of a lowered schedule on GPUs with one hardware queue; infinity if the ranks deadlock."""
    try:
        return simulate(lowered, costs, hardware_queues=HardwareQueues.ONE).makespan
    except Deadlock:
        return inf
