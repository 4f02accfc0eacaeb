"""Simulation of the messages of a lowered schedule on NCCL's streams, and the check for deadlocks.

Every ordered pair of ranks (source, destination) has a channel, and every channel has its own communicator and stream.
A send or receive starts when two conditions hold: the compute stream of its rank has reached the point where the send
or receive is posted, and the previous message of its channel is complete. A message starts when both its send and its
receive have started, and is complete when its transfer time has passed. The computation that uses the message waits
until the message is complete. A collective of vocabulary shards is simulated as a message in which every rank takes
part; all collectives share one stream.

A GPU takes launches from hardware queues. With many queues, launches of different streams do not wait for each other.
With one queue, the launches of a rank start in order. With one queue, a launch that waits for earlier work of its
stream delays all later launches of the rank. With one queue, a send or receive that is posted while the previous
message of its channel is in flight therefore blocks the next computation of its rank, even if the message in flight
depends on that computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import Deadlock
from megatron.zero_bubble.schedule.graph import circle
from megatron.zero_bubble.schedule.host_link import LinkTimes
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import SENDS, OpKind
from megatron.zero_bubble.schedule.launches import Host, Stream, StreamLaunch, Streams
from megatron.zero_bubble.schedule.timeline import HardwareQueues, Lanes, TimedOp, timed_ops


def check_streams(schedule: Schedule) -> None:
    """Check that a lowered schedule has no deadlock on NCCL's streams, with one hardware queue and with many.

    A schedule that completes with one hardware queue also completes with many, because one queue only adds waits.

    Raises:
        Deadlock: some ranks wait for each other forever.
    """
    costs = StageCosts.uniform(schedule.num_stages)
    try:
        run_on_streams(schedule, costs, HardwareQueues.ONE)
    except Deadlock:
        # If the ranks also deadlock with many queues, the error for many queues is raised instead.
        run_on_streams(schedule, costs, HardwareQueues.MANY)
        raise


def run_on_streams(schedule: Schedule, costs: StageCosts, queues: HardwareQueues) -> tuple[Lanes, Lanes]:
    """Simulate a lowered schedule on NCCL's streams, in time linear in the number of operations.

    Args:
        schedule: lowered schedule, which must have passed all checks of `validate` except `check_streams`.
        costs: costs of the stages; a deadlock does not depend on the costs.
        queues: number of hardware queues of a GPU.

    Returns:
        Rank -> computations of the rank, with their times; and rank -> copies on the host link of the rank, with their
        times.

    Raises:
        Deadlock: some ranks wait for each other forever.
        InvalidSchedule: a rank has not posted the receive or collective that brings the input of an operation.
    """
    streams, links = Streams(schedule, costs), LinkTimes.of_ranks(schedule, costs)
    devices = [
        _Device(Host(streams, rank), queues, links[rank] if links else None) for rank in range(schedule.num_ranks)
    ]
    runnable = deque(range(len(devices)))
    while runnable:
        rank = runnable.popleft()
        devices[rank].go_on(runnable)
        blocked_by = devices[rank].blocked_by
        if blocked_by is not None:
            blocked_by.waiting.append(rank)
    if any(device.blocked_by is not None for device in devices):
        raise Deadlock(_deadlock(schedule, devices, queues))
    return tuple(device.lane() for device in devices), tuple(tuple(link.copies) for link in links)


def _deadlock(schedule: Schedule, devices: Sequence[_Device], queues: HardwareQueues) -> str:
    """The error message of a deadlock: one line with the ranks that wait for each other."""
    waits_for: dict[int, tuple[int, Op]] = {}
    for rank, device in enumerate(devices):
        if device.blocked_by is not None:
            waits_for[rank] = next(
                (other, op)
                for other in device.blocked_by.ranks
                if (op := devices[other].missing_end(device.blocked_by)) is not None
            )
    steps = []
    for rank in circle({rank: other for rank, (other, _) in waits_for.items()}):
        other, op = waits_for[rank]
        steps.append(f"rank {rank} at {devices[rank].at()} waits for {op} of rank {other}")
    one_queue = queues is HardwareQueues.ONE
    where = " with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)" if one_queue else ""
    remedy = "; lower it again to remove the deadlock" if one_queue else ""
    return f"schedule {schedule.name} deadlocks{where}: {'; '.join(steps)}{remedy}"


class _Device:
    """A simulated GPU, which runs the launches of one rank until a launch has to wait."""

    def __init__(self, launches: Host, queues: HardwareQueues, link: LinkTimes | None) -> None:
        self._link = link
        self.blocked_by: Stream | None = None
        self._launches = launches
        self._by_kind: dict[tuple[OpKind, int], StreamLaunch] = {}
        """(kind, chunk) -> launch of the operations with this kind and chunk."""
        self._ops: Sequence[Op | None] = launches.ops
        """The operations in order; None stands for a wait until all sends and collectives are complete."""
        if launches.schedule.has_post_validation:
            self._ops = [each for op in launches.ops for each in ((op, None) if op.kind is OpKind.STEP else (op,))]
        self._in_line = queues is HardwareQueues.ONE
        self._in_pairs = launches.times_in_pairs
        self._position = 0
        """Position of the next launch."""
        self._free: float = 0
        """Time at which the compute stream finishes all started computations."""
        self._issued: float = 0
        """Time at which the latest launch has left the hardware queue."""
        self._computed: list[Op] = []
        self._starts: list[float] = []
        self._ends: list[float] = []

    def lane(self) -> tuple[TimedOp, ...]:
        """The computations that have run, with their times."""
        return timed_ops(self._computed, self._starts, self._ends)

    def go_on(self, runnable: deque[int]) -> None:
        """Run launches until one has to wait; add to `runnable` the ranks whose awaited message becomes complete."""
        self.blocked_by = None
        ops, by_kind, in_line = self._ops, self._by_kind, self._in_line
        for position in range(self._position, len(ops)):
            op = ops[position]
            if op is None:
                if not self._wait_for_sends():
                    return
                continue
            kind, microbatch, chunk = op
            launch = by_kind.get((kind, chunk))
            if launch is None:
                launch = by_kind[kind, chunk] = self._launches.of(kind, chunk)
            time, end, computes, indices = launch
            start = self._issued if self._issued > self._free else self._free
            if end is not None and (computes or in_line):
                # With one queue, an operation leaves the queue when its stream's previous operation is complete.
                index = indices.get(microbatch) if computes else end.num_posted - 1
                if index is None:
                    raise self._launches.missing(op)
                complete = end.stream.complete
                if index >= len(complete):
                    self.blocked_by = end.stream
                    return
                if index >= 0 and complete[index] > start:
                    start = complete[index]
            if in_line:
                self._issued = start
            self._position = position + 1
            if computes:
                indices.pop(microbatch, None)
                if self._in_pairs:
                    time = self._in_pairs.get(op, time)
                if self._link is not None:
                    start = self._link.start_of(op, start)
                self._free = start + time
                if self._link is not None:
                    self._link.copy_after(op, self._free)
                self._computed.append(op)
                self._starts.append(start)
                self._ends.append(self._free)
                if kind is not OpKind.STEP:
                    continue
                end, time = self._launches.reduction, self._launches.streams.time_of_reduction
            else:
                assert end is not None, "every message has a stream"
                if kind not in SENDS:
                    indices[microbatch] = end.num_posted
            stream = end.stream
            end.num_posted += 1
            if stream.start(end.num_posted - 1, start, time):
                runnable.extend(stream.waiting)
                stream.waiting.clear()

    def _wait_for_sends(self) -> bool:
        """Let the compute stream wait for all sends and collectives; return False if a message cannot complete yet."""
        start = max(self._free, self._issued)
        for end in self._launches.sending():
            if end.num_posted > len(end.stream.complete):
                self.blocked_by = end.stream
                return False
            start = max(start, end.stream.complete[end.num_posted - 1])
        self._free = start
        if self._in_line:
            self._issued = start
        self._position += 1
        return True

    def missing_end(self, stream: Stream) -> Op | None:
        """The operation with which this rank takes part in the first incomplete message of `stream`.

        `missing_end` returns None if no remaining operation of the rank takes part in the message.
        """
        for op in islice(self._ops, self._position, None):
            end = None if op is None else self._launches.posted_by(op)
            if end is not None and end.stream is stream:
                return op if end.num_posted == len(stream.complete) else None
        return None

    def at(self) -> Op | str:
        """Name of the launch at which the rank waits, for error messages."""
        return self._ops[self._position] or "its end"
