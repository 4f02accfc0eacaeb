"""Analysis of a timeline: bubbles by cause, the critical path, idle ranks, and memory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

from megatron.zero_bubble.schedule.graph import (
    arrivals,
    dependencies,
    message_time,
    receive_before,
    send_after,
)
from megatron.zero_bubble.schedule.host_link import times_of_return
from megatron.zero_bubble.schedule.ir import Op
from megatron.zero_bubble.schedule.kinds import KINDS, PAIRED, OpKind
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline, num_ahead


@dataclass(frozen=True)
class Bubble:
    """The idle time of one rank within the makespan, divided by cause and measured in the time unit of the costs."""

    warmup: float
    """Idle time before the first F of the rank, while the pipeline fills."""
    waiting_for_forward: float
    """Idle time until the input of an F, E (embedding) or S (output layer) arrives, except before a rank's first F."""
    waiting_for_backward: float
    """Idle time until the input of a backward, a loss or a weight gradient arrives."""
    waiting_for_validation: float
    """Idle time at VALIDATE (post-validation) until the norm of all gradients of the previous iteration arrives."""
    communication: float
    """Time for which sends and receives block the rank; 0 if communication overlaps with computation."""
    tail: float
    """Idle time after the last operation of the rank, while the pipeline drains."""
    waiting_for_copy: float = 0
    """Idle time until a copy to the host ends (at D), or until activations are back from the host (at a backward)."""
    streams: float = 0
    """Idle time because a message or launch waits behind another launch on the GPU (see `schedule.streams`)."""

    @property
    def total(self) -> float:
        """Idle time of the rank: the makespan minus the time for which the rank computes."""
        return self.warmup + self.within_span + self.tail

    @property
    def within_span(self) -> float:
        """The idle time between the first F and the last operation of the rank."""
        waiting = self.waiting_for_forward + self.waiting_for_backward + self.waiting_for_validation
        return waiting + self.waiting_for_copy + self.communication + self.streams


def bubbles(timeline: Timeline) -> tuple[Bubble, ...]:
    """Return the bubble of each rank; for a rank without operations, the whole makespan counts as warmup."""
    lanes = [lane for lane in timeline.lanes if lane]
    start = min((lane[0].start for lane in lanes), default=0)
    end = max((lane[-1].end for lane in lanes), default=0)
    return tuple(_bubble(timeline, rank, start, end) for rank in range(len(timeline.lanes)))


BUBBLE_WORDS = (
    ("warmup", "warmup"),
    ("waiting_for_forward", "waiting for F"),
    ("waiting_for_backward", "waiting for B"),
    ("waiting_for_validation", "waiting for validation"),
    ("waiting_for_copy", "waiting for copies"),
    ("communication", "communication"),
    ("streams", "streams"),
    ("tail", "tail"),
)
"""(field of `Bubble`, name of the cause of idle time)"""


def causes(timeline: Timeline) -> dict[str, tuple[float, ...]]:
    """Return the columns of a table of the bubbles: cause of idle time -> idle time of every rank due to this cause.

    The table has a column for validation only if the schedule has post-validation. The table has a column for copies to
    the host only if the schedule offloads activations. The table has a column for NCCL's streams only if the timeline
    was simulated with hardware queues.
    """
    of_ranks = bubbles(timeline)
    words = dict(BUBBLE_WORDS)
    if not timeline.schedule.has_post_validation:
        del words["waiting_for_validation"]
    if not timeline.schedule.offloads:
        del words["waiting_for_copy"]
    if timeline.hardware_queues is None:
        del words["streams"]
    return {word: tuple(getattr(bubble, name) for bubble in of_ranks) for name, word in words.items()}


def _bubble(timeline: Timeline, rank: int, start: float, end: float) -> Bubble:
    if not timeline.lanes[rank]:
        return Bubble(end - start, 0, 0, 0, 0, 0)
    ahead = num_ahead(timeline.lanes[rank])
    embeddings = sum(timed.end - timed.start for timed in timeline.lanes[rank][:ahead])
    lane = timeline.lanes[rank][ahead:]
    idle: dict[str, float] = dict.fromkeys((field.name for field in fields(Bubble)), 0)
    idle |= {"warmup": lane[0].start - start - embeddings, "tail": end - lane[-1].end}
    copied_back = times_of_return(timeline, rank)
    for position, (before, timed) in enumerate(pairwise(lane), ahead):
        gap = timed.start - before.end
        if not timeline.overlap_communication:
            busy = _time_sending(timeline, rank, position) + _time_receiving(timeline, rank, timed.op)
            idle["communication"] += busy
            gap -= busy
        if timeline.hardware_queues is not None:
            arrival = max((time for time, _ in _arrivals(timeline, rank, timed.op)), default=before.end)
            queued = gap - min(gap, max(0, arrival - before.end))
            idle["streams"] += queued
            gap -= queued
        is_copied_back = copied_back.get(timed.op) == timed.start
        idle["waiting_for_copy" if is_copied_back else KINDS[timed.op.kind].waiting] += gap
    return Bubble(**idle)


def _time_sending(timeline: Timeline, rank: int, position: int) -> float:
    """Time for which `rank` is occupied by sending results after the operation at `position`.

    A pair sends the results of its forward and of its backward after the backward.
    """
    placement, lane = timeline.schedule.placement, timeline.lanes[rank]
    if position + 1 < len(lane) and lane[position + 1].op.kind in PAIRED:
        return 0.0
    first = position - (lane[position].op.kind in PAIRED)
    sends = (send_after(placement, rank, timed.op) for timed in lane[first : position + 1])
    return sum(message_time(placement, timeline.costs, rank, send) for send in sends)


def _time_receiving(timeline: Timeline, rank: int, op: Op) -> float:
    """Time for which `rank` is occupied by receiving the input of `op`."""
    placement = timeline.schedule.placement
    return message_time(placement, timeline.costs, rank, receive_before(placement, rank, op))


def critical_path(timeline: Timeline) -> tuple[tuple[int, TimedOp], ...]:
    """The critical path of a timeline: the chain of operations that determines the makespan.

    Each operation of the critical path waits for the previous operation of the path, either because both operations run
    on the same rank, or because the previous operation makes an input of the waiting operation. If the last input of an
    operation of the critical path arrives just when the rank becomes free, the path contains the previous operation of
    the rank. `critical_path` ignores the time for which an operation waits on an NCCL stream.

    Returns:
        (rank, operation with its times) for each operation of the critical path, from the first to the last.
    """
    last = [(lane[-1].end, -rank) for rank, lane in enumerate(timeline.lanes) if lane]
    path: list[tuple[int, TimedOp]] = []
    at = (-max(last)[1], len(timeline.lanes[-max(last)[1]]) - 1) if last else None
    while at is not None:
        path.append((at[0], timeline.lanes[at[0]][at[1]]))
        at = _limited_by(timeline, *at)
    return tuple(reversed(path))


def messages(timeline: Timeline) -> Iterator[tuple[int, TimedOp, int, TimedOp]]:
    """Yield (source rank, producing operation, destination rank, consuming operation) of every message."""
    for rank, lane in enumerate(timeline.lanes):
        for timed in lane:
            for source, node in arrivals(timeline.schedule, rank, timed.op):
                if not source.is_reduced:
                    producer, position = timeline.producers[node]
                    yield producer, timeline.lanes[producer][position], rank, timed


class Input(NamedTuple):
    """A result that an operation needs as an input."""

    rank: int
    """Rank that produces the result."""
    position: int
    """Position of the producing operation among the operations of its rank."""
    arrival: float
    """Arrival time of the result; for a message that does not overlap with computation, end time of the producer."""


def inputs(timeline: Timeline) -> tuple[tuple[tuple[Input, ...], ...], ...]:
    """Rank -> position of an operation on the rank -> results that the operation needs."""
    return tuple(tuple(_inputs(timeline, rank, timed.op) for timed in lane) for rank, lane in enumerate(timeline.lanes))


def _inputs(timeline: Timeline, rank: int, op: Op) -> tuple[Input, ...]:
    places = dict.fromkeys(timeline.producers[node] for node in dependencies(timeline.schedule, rank, op))
    times = {at: timeline.lanes[at[0]][at[1]].end for at in places}
    times.update({at: time for time, at in _arrivals(timeline, rank, op)})
    return tuple(Input(*at, time) for at, time in times.items())


def _limited_by(timeline: Timeline, rank: int, position: int) -> tuple[int, int] | None:
    """(rank, position) of the operation that determines the start of the operation at `position` of `rank`."""
    candidates: list[tuple[float, tuple[int, int]]] = []
    if position > 0:
        before = timeline.lanes[rank][position - 1]
        sending = 0 if timeline.overlap_communication else _time_sending(timeline, rank, position - 1)
        candidates.append((before.end + sending, (rank, position - 1)))
    candidates += _arrivals(timeline, rank, timeline.lanes[rank][position].op)
    latest = max((time for time, _ in candidates), default=0)
    return next((at for time, at in candidates if time == latest), None)


def _arrivals(timeline: Timeline, rank: int, op: Op) -> Iterator[tuple[float, tuple[int, int]]]:
    """Yield (earliest arrival, (rank, position) of the producer) for each result that `op` needs from another rank."""
    for source, node in arrivals(timeline.schedule, rank, op):
        producer, at = timeline.producers[node]
        overlaps = timeline.overlap_communication or source.is_reduced
        yield timeline.lanes[producer][at].end + (source.transit(timeline.costs) if overlaps else 0), (producer, at)


Steps = list[tuple[float, float]]
"""A step function as points (time, value): each value holds from its time to the time of the next point."""


def idle_ranks_over_time(timeline: Timeline) -> Steps:
    """The number of idle ranks over time."""
    changes: Counter[float] = Counter()
    for lane in timeline.lanes:
        for timed in lane:
            changes[timed.start] -= 1
            changes[timed.end] += 1
    idle = len(timeline.lanes)
    steps: Steps = []
    for time in sorted(changes):
        idle += changes[time]
        if not steps or steps[-1][1] != idle:
            steps.append((time, idle))
    return steps


def memory_over_time(timeline: Timeline, rank: int) -> Steps:
    """The memory of the activations of `rank` over time, in the unit of the costs."""
    steps: Steps = [(0, 0)]
    memory = timeline.memory_held(rank)
    for timed, (_, during, after) in zip(timeline.lanes[rank], memory, strict=True):
        if steps[-1][0] == timed.start:
            steps.pop()  # at this time one operation releases memory and the next operation allocates memory
        steps += [(timed.start, during), (timed.end, after)]
    return steps


def by_result(measured: Mapping[OpKind, float]) -> dict[OpKind, float]:
    """Convert values measured for each kind of operation to values for each kind of result, such as F, B and W.

    Half of the value of a fused backward (BW) counts as B and half as W, unless B and W were measured separately.
    """
    values = {kind: value for kind, value in measured.items() if KINDS[kind].makes == (kind,)}
    for kind, value in measured.items():
        for result in KINDS[kind].makes:
            values.setdefault(result, value / len(KINDS[kind].makes))
    return values


def fused_saving(fused: float, b: float, w: float) -> float:
    """The time by which BW is shorter than B and W together, but no more than half of the time of W.

    Args:
        fused: measured time of the fused backward BW; 0 if no BW was measured.
        b: measured time of B.
        w: measured time of W.
    """
    return min(max(0.0, b + w - fused), w / 2) if fused else 0.0
