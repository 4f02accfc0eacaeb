"""Schedule -> Schedule with communication: the pass that adds sends and receives."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from operator import itemgetter
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Deadlock, ScheduleError
from megatron.zero_bubble.schedule.graph import message_time, other_end, receive_before, send_after
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.streams import HardwareQueues
from megatron.zero_bubble.schedule.timeline import Timeline

RECEIVE_AHEAD = 1
"""How many computations before its consumer a receive is posted, unless told otherwise."""
_NEGLIGIBLE = 0.001
"""The share of the makespan that messages may cost before the receives are tried at other places."""


def lower(schedule: Schedule, receive_ahead: int = RECEIVE_AHEAD, costs: StageCosts | None = None) -> Schedule:
    """The same schedule with the operations that move tensors between ranks, in an order that NCCL can run.

    Every ordered pair of ranks (source, destination) is one channel, which carries activations and
    gradients alike. A send stands right after the operation that makes the tensor. The receives of a
    channel stand in exactly the order in which the source sends on it. A receive is only *posted* where it stands,
    and the wait is at its consumer. Neighbouring stages on one rank exchange no message.

    A receive is posted `receive_ahead` computations before its consumer, and earlier only where the order of
    its channel forces it. Where the schedule would stand still like that on a GPU with one hardware queue (see
    `streams`), or lose time, places that never stand still are tried (see `_between_makers`), and the faster of
    the two is taken. So the lowered schedule can always run, if the schedule itself can. Times are those of
    `costs`; by default an operation takes 1 and a message 0.

    A receive whose message is sent after a VALIDATE is not posted before one: where the validation fails, only
    messages that were sent before it come once more.

    Lowering is idempotent: communication that is already there is dropped and placed anew. Raises `InvalidSchedule`
    if a tensor has no consumer, or none makes it, and `Deadlock` if the schedule itself cannot run.
    """
    if receive_ahead < 0:
        raise ScheduleError(f"receive_ahead must not be negative, got {receive_ahead}")
    schedule = schedule.without_communication()
    costs = costs or StageCosts.uniform(schedule.num_stages)
    channels = _channels(schedule, costs)
    timeline = simulate(schedule, costs)
    order = _Order(timeline, [_Phases(ops) for ops in schedule.ops])
    ahead = _with_messages(schedule, channels, [_ahead(channel, order, receive_ahead) for channel in channels])
    time = _time_with_one_queue(ahead, costs)
    if time <= (1 + _NEGLIGIBLE) * timeline.makespan:
        return ahead
    places = [_between_makers(channel, order, receive_ahead) for channel in channels]
    between = _with_messages(schedule, channels, places)
    return between if _time_with_one_queue(between, costs) < time else ahead


class _Message(NamedTuple):
    """One tensor on its way."""

    send: Op
    maker: int
    """Position of the computation that makes the tensor, on the source."""
    receive: Op
    consumer: int
    """Position of the computation that uses the tensor, on the destination."""
    time: float


class _Channel(NamedTuple):
    """What one rank sends to another, in the order of sending."""

    source: int
    destination: int
    messages: Sequence[_Message]


class _Place(NamedTuple):
    """Where a receive is posted: before which computation, and in which order there."""

    before: int
    turn: float


def _channels(schedule: Schedule, costs: StageCosts) -> list[_Channel]:
    placement = schedule.placement
    consumers: list[dict[Op, int]] = [{} for _ in schedule.ops]
    for rank, ops in enumerate(schedule.ops):
        for position, op in enumerate(ops):
            receive = receive_before(placement, rank, op)
            if receive is not None:
                consumers[rank][receive] = position
    messages: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for source, ops in enumerate(schedule.ops):
        for maker, op in enumerate(ops):
            send = send_after(placement, source, op)
            if send is None:
                continue
            destination, receive = other_end(placement, source, send)
            consumer = consumers[destination].pop(receive, None)
            if consumer is None:
                raise schedule.invalid(f"rank {source} makes {op}, but rank {destination} never uses it")
            time = message_time(placement, costs, source, send)
            messages[source, destination].append(_Message(send, maker, receive, consumer, time))
    _check_all_made(schedule, consumers)
    return [_Channel(*ends, messages[ends]) for ends in sorted(messages)]


def _check_all_made(schedule: Schedule, unmatched: list[dict[Op, int]]) -> None:
    for rank, receives in enumerate(unmatched):
        for receive, position in receives.items():
            raise schedule.invalid(
                f"rank {rank} needs {receive} for {schedule.ops[rank][position]}, "
                f"but rank {schedule.placement.peer_of(rank, receive)} never makes it"
            )


def _with_messages(schedule: Schedule, channels: Sequence[_Channel], places: Sequence[Sequence[_Place]]) -> Schedule:
    """The schedule with its sends, each right after its maker, and with its receives at these places."""
    inserted: list[list[tuple[int, bool, float, int, Op]]] = [[] for _ in schedule.ops]
    for (source, destination, messages), channel_places in zip(channels, places, strict=True):
        for message, (before, turn) in zip(messages, channel_places, strict=True):
            inserted[source].append((message.maker + 1, False, 0, destination, message.send))
            inserted[destination].append((before, True, turn, source, message.receive))
    ops = []
    for computations, communication in zip(schedule.ops, inserted, strict=True):
        lowered: list[Op] = []
        done = 0
        for before, *_, op in sorted(communication, key=itemgetter(0, 1, 2, 3)):
            lowered += computations[done:before]
            lowered.append(op)
            done = before
        ops.append((*lowered, *computations[done:]))
    return replace(schedule, ops=tuple(ops))


class _Phases:
    """The parts into which VALIDATE divides the operations of a rank; without VALIDATE there is one."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.begins = [0] + [position + 1 for position, op in enumerate(ops) if op.kind is OpKind.VALIDATE]

    def of(self, position: int) -> int:
        return bisect_right(self.begins, position) - 1


def _ahead(channel: _Channel, order: _Order, receive_ahead: int) -> list[_Place]:
    """Place every receive `receive_ahead` computations before its consumer, but within the consumer's phase."""
    phases = order.phases[channel.destination]
    places: list[_Place] = []
    for message, turn in reversed(list(zip(channel.messages, order.turns(channel), strict=True))):
        before = max(phases.begins[phases.of(message.consumer)], message.consumer - receive_ahead)
        places.append(_Place(min(before, places[-1].before) if places else before, turn))
    return places[::-1]


class _Order:
    """An order in which the computations of all ranks could run one at a time.

    They are ordered by phase, then by their end in a timeline, then by rank. `starts` and `ends` are the timeline's
    times, shifted so that every phase begins after the previous one has ended on all ranks.
    """

    def __init__(self, timeline: Timeline, phases: Sequence[_Phases]) -> None:
        self.phases = phases
        self.starts: list[list[float]] = []
        self.ends: list[list[float]] = []
        end = max((lane[-1].end for lane in timeline.lanes if lane), default=0)
        for lane, here in zip(timeline.lanes, phases, strict=True):
            shifts: list[float] = []
            for number, (begin, next_begin) in enumerate(pairwise((*here.begins, len(lane) + 1))):
                # The last operation of a phase is VALIDATE, which comes after those of all ranks.
                shifts += [3 * number * end] * (next_begin - 1 - begin) + [(3 * number + 2) * end]
            self.starts.append([timed.start + shift for timed, shift in zip(lane, shifts, strict=False)])
            self.ends.append([timed.end + shift for timed, shift in zip(lane, shifts, strict=False)])

    def turns(self, channel: _Channel) -> list[float]:
        """Return for each message the key that orders receives at one place: when the message before it was made."""
        return [-inf, *(self.ends[channel.source][message.maker] for message in channel.messages[:-1])]

    def num_before(self, rank: int, end: float, source: int) -> int:
        """How many computations of `rank` come before the one of `source` that ends at `end`."""
        return bisect_right(self.ends[rank], end) if rank < source else bisect_left(self.ends[rank], end)


def _between_makers(channel: _Channel, order: _Order, receive_ahead: int) -> list[_Place]:
    """Place the receives of a channel so that no schedule stands still, however long its operations take.

    Take an order in which all computations could run one at a time. Every receive is posted behind the maker of the
    previous message of its channel, so that it holds up nothing on its own rank, and before the maker of
    the next one, whose send waits for it. Then, by induction, whenever it is a computation's turn, all messages
    that were made before are complete but for the last of each channel, and no launch before it waits.

    Within these bounds a receive is posted `receive_ahead` computations before its consumer, or later, if the previous
    message is on its way until then, or earlier, if its own would come too late.
    """
    source, rank, messages = channel
    starts, ends = order.starts[rank], order.ends[rank]
    turns = order.turns(channel)
    places: list[_Place] = []
    for k, message in reversed(list(enumerate(messages))):
        first, undisturbed = order.phases[rank].begins[order.phases[source].of(message.maker)], 0
        if k > 0:
            # A computation that ends before a time begins before it, too: this place comes after the previous maker.
            undisturbed = bisect_left(starts, turns[k] + messages[k - 1].time)
        last, due = message.consumer, starts[message.consumer]
        if places:
            next_made = order.ends[source][messages[k + 1].maker]
            last = min(last, places[-1].before, order.num_before(rank, next_made, source))
            due = min(due, next_made)
        in_time = bisect_right(ends, due - message.time)
        wanted = max(min(message.consumer - receive_ahead, in_time), undisturbed)
        places.append(_Place(min(max(wanted, first), last), turns[k]))
    return places[::-1]


def _time_with_one_queue(lowered: Schedule, costs: StageCosts) -> float:
    """The makespan with one hardware queue; endless if the schedule stands still then."""
    try:
        return simulate(lowered, costs, hardware_queues=HardwareQueues.ONE).makespan
    except Deadlock:
        return inf
