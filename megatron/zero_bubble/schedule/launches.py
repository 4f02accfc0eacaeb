"""The streams of NCCL's messages, and the launches of each rank's host on them."""

from __future__ import annotations

from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import InvalidSchedule
from megatron.zero_bubble.schedule.graph import collective_time, exchange_before, message_time, receive_before
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, COMMUNICATION, RECEIVES, SENDS, OpKind
from megatron.zero_bubble.schedule.pairs import times_in_pairs


class Stream:
    """The messages of a channel, or the collectives of all ranks; each rank starts its own end, in the same order."""

    def __init__(self, num_ends: int) -> None:
        self._num_ends = num_ends
        self.complete: list[float] = []
        """When message 0, 1, ... was complete."""
        self.waiting: list[int] = []
        """The ranks that wait for the next message to be complete."""
        self._num_started: list[int] = []
        self._last_start: list[float] = []

    def start(self, index: int, start: float, time: float) -> bool:
        """Note that one end of message `index` starts; return whether it was the last, so that the message now passes.

        A message takes `time` from when its last end has started.
        """
        if index == len(self._num_started):
            self._num_started.append(1)
            self._last_start.append(start)
        else:
            self._num_started[index] += 1
            self._last_start[index] = start = max(start, self._last_start[index])
        if self._num_started[index] < self._num_ends:
            return False
        self.complete.append((max(start, self.complete[-1]) if index else start) + time)
        return True


class Streams:
    """The streams of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.validation = Stream(num_ranks)
        """The reductions of the state of all gradients, which STEP starts and VALIDATE waits for."""
        self.collectives = Stream(num_ranks)
        """The collectives of vocabulary shards."""
        self._channels: dict[tuple[int, int], Stream] = {}

    def channel(self, source: int, destination: int) -> Stream:
        return self._channels.setdefault((source, destination), Stream(2))


class End:
    """One rank's end of a stream."""

    def __init__(self, stream: Stream, *, sends: bool) -> None:
        self.stream = stream
        self.sends = sends
        """Whether its messages are sends or collectives, for which the rank waits at the end of a step."""
        self.num_posted = 0


class StreamLaunch(NamedTuple):
    """The launch for the operations of one kind and chunk: a computation, or one end of a message."""

    time: float
    """How long the computation or the message takes."""
    end: End | None
    """The stream of the message, or for a computation the stream of its input message; None without one."""
    computes: bool
    """Whether it runs on the compute stream; otherwise it is one end of a message."""
    indices: dict[int, int]
    """Microbatch -> the number, on its stream, of the message that brings a computation its input. It is there from
    when that message is posted until the computation runs."""


class Host:
    """The launches of one rank's executor."""

    def __init__(self, schedule: Schedule, costs: StageCosts | None, rank: int, streams: Streams) -> None:
        self.schedule, self.rank, self.ops = schedule, rank, schedule.ops[rank]
        self._costs, self._streams = costs, streams
        self.reduction = End(streams.validation, sends=False)
        """The rank's end of the reductions of the state of all gradients."""
        self._ends: dict[Stream, End] = {}
        self._indices: dict[tuple[OpKind, int], dict[int, int]] = {}
        """Kind and chunk of messages -> their numbers."""
        self.time_of_reduction = collective_time(costs) if costs is not None else 0
        """Duration of the reduction that a STEP starts."""

    def of(self, kind: OpKind, chunk: int) -> StreamLaunch:
        """Return the launch for the operations of a kind and chunk."""
        op = Op(kind, 0, chunk)
        if kind is OpKind.STEP:
            return StreamLaunch(0, None, True, {})
        if kind is OpKind.VALIDATE:
            before = {validate.microbatch: validate.microbatch - 1 for validate in self.ops if validate.kind is kind}
            return StreamLaunch(0, self.reduction, True, before)
        if kind in COMMUNICATION:
            return StreamLaunch(self._message_time(op), self._end(op), False, self._numbers(op))
        brings = self._input(op)
        if brings is None:
            return StreamLaunch(self._compute_time(op), None, True, {})
        return StreamLaunch(self._compute_time(op), self._end(brings), True, self._numbers(brings))

    def times_in_pairs(self) -> dict[Op, float]:
        """The time of each operation that runs in a pair."""
        if self._costs is None:
            return {}
        return times_in_pairs(self.schedule, self._costs, self.rank)

    def sending(self) -> list[End]:
        """Return the stream ends with sends that the rank waits for at the end of a step."""
        return [end for end in self._ends.values() if end.sends and end.num_posted]

    def posted_by(self, op: Op) -> End | None:
        """The end of a stream on which `op` starts a message, if it does."""
        if op.kind is OpKind.STEP:
            return self.reduction
        return self._end(op) if op.kind in COMMUNICATION else None

    def missing(self, op: Op) -> InvalidSchedule:
        """The error of a computation whose input was not posted."""
        return self.schedule.invalid(f"rank {self.rank} lacks {self._input(op)} for {op}")

    def _numbers(self, message: Op) -> dict[int, int]:
        return self._indices.setdefault((message.kind, message.chunk), {})

    def _end(self, message: Op) -> End:
        stream = self._stream(message)
        return self._ends.setdefault(stream, End(stream, sends=message.kind not in RECEIVES))

    def _stream(self, message: Op) -> Stream:
        if message.kind in COLLECTIVES:
            return self._streams.collectives
        peer = self.schedule.placement.peer_of(self.rank, message)
        return self._streams.channel(*((self.rank, peer) if message.kind in SENDS else (peer, self.rank)))

    def _message_time(self, message: Op) -> float:
        if self._costs is None:
            return 0
        if message.kind in COLLECTIVES:
            return collective_time(self._costs)
        return message_time(self.schedule.placement, self._costs, self.rank, message)

    def _input(self, op: Op) -> Op | None:
        """The receive or collective that brings `op` its input."""
        receive = receive_before(self.schedule.placement, self.rank, op)
        return exchange_before(self.schedule, self.rank, op) if receive is None else receive

    def _compute_time(self, op: Op) -> float:
        if self._costs is None:
            return 0
        return self._costs.times()[op.kind][self.schedule.placement.stage_of(self.rank, op.chunk)]
