"""When messages pass on NCCL's streams, and whether they all do: what a GPU makes of a lowered schedule.

Every channel, an ordered pair of ranks, is a communicator with a stream of its own. A send or receive starts when
its rank's compute stream has reached the point where it was posted and the previous message of its channel is
complete. A message is complete when both of its ends have started and the time that it takes has passed; the
operation that uses it waits for that. The collectives of vocabulary shards are messages with an end on every rank,
on one stream.

A GPU takes launches from hardware queues. With many of them that is all. With one, the launches of a rank stand in
line: the first waits until what came before it on its own stream is complete, and all others wait behind it. A
send or receive that is posted while the previous message of its channel is on its way then holds up the computation
behind it, which may be the very one that this message needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Deadlock
from megatron.zero_bubble.schedule.graph import circle, collective_time, exchange_before, message_time, receive_before
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, COMMUNICATION, RECEIVES, SENDS, OpKind
from megatron.zero_bubble.schedule.timeline import HardwareQueues, TimedOp


def check_streams(schedule: Schedule) -> None:
    """Raise `Deadlock` unless a lowered schedule runs to its end on NCCL's streams, with one hardware queue and many.

    A schedule that runs with one queue also runs with many, because one queue only adds waits.
    """
    replay = StreamReplay(schedule)
    try:
        replay.run(HardwareQueues.ONE)
    except Deadlock:
        replay.run(HardwareQueues.MANY)  # if that stands still, too, the error is not about the queue
        raise


class StreamReplay:
    """Runs a lowered schedule on NCCL's streams, in time linear in the number of operations.

    Without costs nothing takes time. Raises `InvalidSchedule` where an operation uses a message that its rank has
    not posted; what else `validate` checks is taken for granted.
    """

    def __init__(self, schedule: Schedule, costs: StageCosts | None = None) -> None:
        self._name = schedule.name
        streams = _Streams(schedule.num_ranks)
        self._streams = streams
        self._launches = [tuple(_Host(schedule, costs, rank, streams).launches()) for rank in range(schedule.num_ranks)]

    def run(self, queues: HardwareQueues) -> tuple[tuple[TimedOp, ...], ...]:
        """For every rank, its computations and when they ran. Raises `Deadlock`."""
        self._streams.reset()
        devices = [_Device(launches, queues) for launches in self._launches]
        runnable = deque(range(len(devices)))
        while runnable:
            rank = runnable.popleft()
            for stream in devices[rank].go_on():
                runnable.extend(stream.waiting)
                stream.waiting.clear()
            blocked_by = devices[rank].blocked_by
            if blocked_by is not None:
                blocked_by.waiting.append(rank)
        if any(device.blocked_by is not None for device in devices):
            raise Deadlock(self._explain(devices, queues))
        return tuple(tuple(device.lane) for device in devices)

    def _explain(self, devices: Sequence[_Device], queues: HardwareQueues) -> str:
        """One line with the ranks that wait for each other."""
        waits_for: dict[int, tuple[int, Op]] = {}
        for rank, device in enumerate(devices):
            if device.blocked_by is not None:
                message = (device.blocked_by, len(device.blocked_by.complete))
                waits_for[rank] = next(
                    (other, launch.op)
                    for other, late in enumerate(devices)
                    for launch in late.launches[late.position :]
                    if launch.starts == message and launch.op is not None
                )
        steps = []
        for rank in circle({rank: other for rank, (other, _) in waits_for.items()}):
            other, op = waits_for[rank]
            steps.append(f"rank {rank} at {devices[rank].at()} waits for {op} of rank {other}")
        circle_of_waits = "; ".join(steps)
        if queues is HardwareQueues.MANY:
            return f"schedule {self._name} deadlocks: {circle_of_waits}"
        where = "with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)"
        return f"schedule {self._name} deadlocks {where}: {circle_of_waits}; lower it again to remove the deadlock"


class _Stream:
    """The messages of a channel, or the collectives of all ranks; each rank starts its own end, in the same order."""

    def __init__(self, num_ends: int) -> None:
        self._num_ends = num_ends
        self.reset()

    def reset(self) -> None:
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


class _Streams:
    """The streams of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.validation = _Stream(num_ranks)
        """The reductions of the state of all gradients, which STEP starts and VALIDATE waits for."""
        self.collectives = _Stream(num_ranks)
        """The collectives of vocabulary shards."""
        self._channels: dict[tuple[int, int], _Stream] = {}

    def channel(self, source: int, destination: int) -> _Stream:
        return self._channels.setdefault((source, destination), _Stream(2))

    def reset(self) -> None:
        for stream in (self.validation, self.collectives, *self._channels.values()):
            stream.reset()


_Message = tuple[_Stream, int]
"""A message, named by its stream and by the number of messages before it on that stream."""


class _Launch(NamedTuple):
    """One launch of the host on one stream: an operation or, if `op` is None, a wait of the compute stream."""

    op: Op | None
    computes: bool
    """Whether it runs on the compute stream; otherwise it is one end of a message."""
    time: float
    """How long the computation takes."""
    awaited: Sequence[_Message]
    """The messages that the compute stream waits for before it."""
    starts: _Message | None
    """The message of which the launch is one end, or the reduction that a STEP takes part in."""
    message_time: float = 0


class _Host:
    """Generates the launches of one rank's executor, in its order."""

    def __init__(self, schedule: Schedule, costs: StageCosts | None, rank: int, streams: _Streams) -> None:
        self._schedule, self._costs, self._rank, self._streams = schedule, costs, rank, streams
        self._posted: dict[_Stream, int] = {}
        """How many messages were posted on each of the rank's channels."""
        self._sent: dict[_Stream, int] = {}
        """Number of the last message that the rank has sent on each of its channels, and of its last collective."""
        self._unused: dict[Op, _Message] = {}
        """The messages that were received, and the collectives, that were not used yet."""

    def launches(self) -> Iterator[_Launch]:
        # All messages of one kind and chunk have the same channel and time; likewise computations.
        messages: dict[tuple[OpKind, int], tuple[_Stream, float]] = {}
        computations: dict[tuple[OpKind, int], tuple[Op | None, float]] = {}
        for op in self._schedule.ops[self._rank]:
            key = (op.kind, op.chunk)
            if op.kind in COMMUNICATION:
                if key not in messages:
                    messages[key] = self._stream(op), self._message_time(op)
                yield self._message(op, *messages[key])
            elif op.kind is OpKind.VALIDATE:
                reduction = ((self._streams.validation, op.microbatch - 1),) if op.microbatch else ()
                yield _Launch(op, True, 0, reduction, None)
            elif op.kind is OpKind.STEP:
                yield from self._step(op)
            else:
                if key not in computations:
                    computations[key] = self._input(op), self._compute_time(op)
                yield self._computation(op, *computations[key])

    def _message(self, op: Op, channel: _Stream, time: float) -> _Launch:
        index = self._posted.get(channel, 0)
        self._posted[channel] = index + 1
        message = (channel, index)
        if op.kind not in RECEIVES:
            self._sent[channel] = index
        if op.kind not in SENDS:
            self._unused[op] = message
        return _Launch(op, False, 0, (), message, time)

    def _computation(self, op: Op, first_input: Op | None, time: float) -> _Launch:
        """The launch of a computation; `first_input` is what brings the first one of its kind and chunk its input."""
        if first_input is None:
            return _Launch(op, True, time, (), None)
        brings = first_input._replace(microbatch=op.microbatch)
        message = self._unused.pop(brings, None)
        if message is None:
            raise self._schedule.invalid(f"rank {self._rank} lacks {brings} for {op}")
        return _Launch(op, True, time, (message,), None)

    def _step(self, op: Op) -> Iterator[_Launch]:
        """Yield the launches of STEP: the start of a reduction, which takes as long as the slowest message, and a wait
        for all sends and collectives, as at the end of a step."""
        time = collective_time(self._costs) if self._costs is not None else 0
        yield _Launch(op, True, 0, (), (self._streams.validation, op.microbatch), time)
        yield _Launch(None, True, 0, tuple(self._sent.items()), None)

    def _stream(self, message: Op) -> _Stream:
        if message.kind in COLLECTIVES:
            return self._streams.collectives
        peer = self._schedule.placement.peer_of(self._rank, message)
        return self._streams.channel(*((self._rank, peer) if message.kind in SENDS else (peer, self._rank)))

    def _message_time(self, message: Op) -> float:
        if self._costs is None:
            return 0
        if message.kind in COLLECTIVES:
            return collective_time(self._costs)
        return message_time(self._schedule.placement, self._costs, self._rank, message)

    def _input(self, op: Op) -> Op | None:
        """The receive or collective that brings `op` its input."""
        receive = receive_before(self._schedule.placement, self._rank, op)
        return exchange_before(self._schedule, self._rank, op) if receive is None else receive

    def _compute_time(self, op: Op) -> float:
        if self._costs is None:
            return 0
        return self._costs.times()[op.kind][self._schedule.placement.stage_of(self._rank, op.chunk)]


class _Device:
    """Simulates one rank's GPU, which runs its launches until one has to wait."""

    def __init__(self, launches: Sequence[_Launch], queues: HardwareQueues) -> None:
        self.launches = launches
        self.position = 0
        """The position of the launch that is to start next."""
        self.blocked_by: _Stream | None = None
        self.lane: list[TimedOp] = []
        self._in_line = queues is HardwareQueues.ONE
        self._free: float = 0
        """When the compute stream has finished all that was started."""
        self._issued: float = 0
        """When the last launch left the line."""

    def go_on(self) -> Iterator[_Stream]:
        """Run until a launch has to wait or all have run; yield every stream of which a message becomes complete."""
        self.blocked_by = None
        while self.position < len(self.launches):
            op, computes, time, awaited, starts, message_time = self.launches[self.position]
            start = max(self._free, self._issued)
            if self._in_line and not computes:
                awaited = self._one_before(starts)
            for stream, index in awaited:
                if index >= len(stream.complete):
                    self.blocked_by = stream
                    return
                start = max(start, stream.complete[index])
            if computes:
                self._free = start + time
                if op is not None:
                    self.lane.append(TimedOp(op, start, self._free))
            if self._in_line:
                self._issued = start
            self.position += 1
            if starts is not None and starts[0].start(starts[1], start, message_time):
                yield starts[0]

    @staticmethod
    def _one_before(message: _Message | None) -> tuple[_Message, ...]:
        """The previous message of the stream, which must be complete before an end of `message` can leave the line."""
        return ((message[0], message[1] - 1),) if message is not None and message[1] else ()

    def at(self) -> Op | str:
        """Name the launch that waits."""
        return self.launches[self.position].op or "its end"
