"""Streams of NCCL messages, and the launches of each rank on these streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import InvalidSchedule
from megatron.zero_bubble.schedule.graph import collective_time, exchange_before, message_time, receive_before
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, COMMUNICATION, RECEIVES, SENDS, OpKind
from megatron.zero_bubble.schedule.pairs import times_in_pairs


class Stream:
    """An NCCL stream, which carries either the messages from one rank to another or the collectives of all ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        """The ranks that take part in each message."""
        self.complete: list[float] = []
        """Index of a message -> completion time, for all messages before the first incomplete message."""
        self.waiting: list[int] = []
        """The ranks that wait for the completion of the first incomplete message of the stream."""
        self._num_started: list[int] = []
        """Index of a message -> number of ranks that have started their send, receive or collective for the message."""
        self._last_start: list[float] = []
        """Index of a message -> latest start so far of a send, receive or collective for the message."""

    def start(self, index: int, start: float, time: float) -> bool:
        """Start a message on one rank; return whether the message has started on all of its ranks.

        Args:
            index: index of the message on the stream.
            start: time at which the message starts on the rank.
            time: duration of the message after it has started on all of its ranks.
        """
        if index == len(self._num_started):
            self._num_started.append(1)
            self._last_start.append(start)
        else:
            self._num_started[index] += 1
            self._last_start[index] = start = max(start, self._last_start[index])
        if self._num_started[index] < len(self.ranks):
            return False
        self.complete.append((max(start, self.complete[-1]) if index else start) + time)
        return True


class Streams:
    """The NCCL streams of all ranks."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self.schedule, self.costs, self.times = schedule, costs, costs.times
        self.validation = Stream(range(schedule.num_ranks))
        """The stream of the all-reduces of the gradient norm; STEP starts one, and the next VALIDATE waits for it."""
        self.time_of_reduction = collective_time(costs)
        """Duration of the all-reduce of the global gradient norm."""
        self.collectives = Stream(range(schedule.num_ranks))
        """The stream that runs the collectives of vocabulary shards."""
        self._channels: dict[tuple[int, int], Stream] = {}

    def channel(self, source: int, destination: int) -> Stream:
        """Return the stream of the messages from rank `source` to rank `destination`."""
        ends = source, destination
        return self._channels.setdefault(ends, Stream(ends))


class End:
    """One rank's endpoint of an NCCL stream."""

    def __init__(self, stream: Stream, *, sends: bool) -> None:
        self.stream = stream
        self.sends = sends
        """Whether the rank posts sends or collectives on the stream; the end of an iteration waits for them."""
        self.num_posted = 0


class StreamLaunch(NamedTuple):
    """Properties that are the same for all launches of one kind of operation and one chunk."""

    time: float
    """Duration of the computation or of the message."""
    end: End | None
    """The rank's endpoint of the stream that carries the message. For a computation, the stream carries the input
    message of the computation. None for a computation without an input message."""
    computes: bool
    """Whether the launch is a computation on the compute stream, and not a send, a receive or a collective."""
    indices: dict[int, int]
    """Microbatch -> index, on the stream, of the message that brings the input of the computation. A microbatch is in
    this mapping from the posting of its input message until its computation runs."""


class Host:
    """The launches that the executor of one rank makes on the compute stream and on NCCL's streams."""

    def __init__(self, streams: Streams, rank: int) -> None:
        self.schedule, self.rank, self.ops = streams.schedule, rank, streams.schedule.ops[rank]
        self.streams = streams
        self.times_in_pairs = times_in_pairs(streams.schedule, streams.costs, rank)
        """Operation in a forward-backward pair -> duration of the operation."""
        self.reduction = End(streams.validation, sends=False)
        """This rank's endpoint of the stream for the reduction of the global gradient norm."""
        self._ends: dict[Stream, End] = {}
        self._indices: dict[tuple[OpKind, int], dict[int, int]] = {}
        """(kind, chunk) of messages -> {microbatch: index of its message on the stream}."""

    def of(self, kind: OpKind, chunk: int) -> StreamLaunch:
        """Return the properties that are the same for all launches of the given kind of operation and chunk."""
        op = Op(kind, 0, chunk)
        if kind is OpKind.VALIDATE:
            before = {validate.microbatch: validate.microbatch - 1 for validate in self.ops if validate.kind is kind}
            return StreamLaunch(0, self.reduction, True, before)
        if kind in COMMUNICATION:
            time = message_time(self.schedule.placement, self.streams.costs, self.rank, op)
            return StreamLaunch(time, self._end(op), False, self._numbers(op))
        time = self.streams.times[kind][self.schedule.placement.stage_of(self.rank, chunk)]
        input_message = self._input(op)
        if input_message is None:
            return StreamLaunch(time, None, True, {})
        return StreamLaunch(time, self._end(input_message), True, self._numbers(input_message))

    def sending(self) -> list[End]:
        """Return this rank's endpoints of the streams on which the rank has posted sends or collectives.

        The rank ends an iteration only after all sends and collectives that it has posted are complete.
        """
        return [end for end in self._ends.values() if end.sends and end.num_posted]

    def posted_by(self, op: Op) -> End | None:
        """This rank's endpoint of the stream on which `op` starts a message; None if `op` starts no message."""
        if op.kind is OpKind.STEP:
            return self.reduction
        return self._end(op) if op.kind in COMMUNICATION else None

    def missing(self, op: Op) -> InvalidSchedule:
        """The error for a computation whose input message was not posted."""
        return self.schedule.invalid(f"rank {self.rank} lacks {self._input(op)} for {op}")

    def _numbers(self, message: Op) -> dict[int, int]:
        return self._indices.setdefault((message.kind, message.chunk), {})

    def _end(self, message: Op) -> End:
        if message.kind in COLLECTIVES:
            stream = self.streams.collectives
        else:
            peer = self.schedule.placement.peer_of(self.rank, message)
            source, destination = (self.rank, peer) if message.kind in SENDS else (peer, self.rank)
            stream = self.streams.channel(source, destination)
        return self._ends.setdefault(stream, End(stream, sends=message.kind not in RECEIVES))

    def _input(self, op: Op) -> Op | None:
        """The receive or collective that brings the input of `op`; None if the input is from the same rank."""
        return receive_before(self.schedule.placement, self.rank, op) or exchange_before(self.schedule, self.rank, op)
