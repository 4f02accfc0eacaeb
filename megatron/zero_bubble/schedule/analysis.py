"""Analyses a timeline: bubbles by cause, the critical path, idle ranks, and memory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron.zero_bubble.schedule.graph import (
    Node,
    arrivals,
    dependencies,
    message_time,
    nodes_of,
    receive_before,
    send_after,
)
from megatron.zero_bubble.schedule.host_link import times_of_return
from megatron.zero_bubble.schedule.ir import Op
from megatron.zero_bubble.schedule.kinds import KINDS
from megatron.zero_bubble.schedule.pairs import forwards_in_pairs
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline, num_ahead


@dataclass(frozen=True)
class Bubble:
    """The time of one rank within the makespan that is not spent on compute operations, by cause."""

    warmup: float
    """Idle before the rank's first F, while the pipeline fills."""
    waiting_for_forward: float
    """Idle before a later F whose input has not arrived."""
    waiting_for_backward: float
    """Idle before a B or BW whose gradient has not arrived."""
    waiting_for_validation: float
    """Idle before a VALIDATE, until the state of all gradients of the previous iteration is known."""
    communication: float
    """Sending and receiving, where that occupies the rank."""
    tail: float
    """Idle after the rank's last operation, while the pipeline drains."""
    waiting_for_copy: float = 0
    """Idle before a D whose copy to the host has not ended, or before a backward whose activations are not back yet."""
    streams: float = 0
    """Waiting only because a message or launch is in line behind another on the GPU (see `schedule.streams`)."""

    @property
    def total(self) -> float:
        """The makespan without the rank's work."""
        return self.warmup + self.within_span + self.tail

    @property
    def within_span(self) -> float:
        """The part of the bubble between the rank's first and last operation, which lengthens its span."""
        waiting = self.waiting_for_forward + self.waiting_for_backward + self.waiting_for_validation
        return waiting + self.waiting_for_copy + self.communication + self.streams


def bubbles(timeline: Timeline) -> tuple[Bubble, ...]:
    """For every rank that has operations, its bubble by cause; a rank without any only waits."""
    lanes = [lane for lane in timeline.lanes if lane]
    begin = min((lane[0].start for lane in lanes), default=0)
    end = max((lane[-1].end for lane in lanes), default=0)
    where = _positions(timeline)
    return tuple(_bubble(timeline, where, rank, begin, end) for rank in range(len(timeline.lanes)))


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
"""(field of `Bubble`, the cause in words)"""


def causes(timeline: Timeline) -> dict[str, tuple[float, ...]]:
    """Return the idle time of every rank by its cause, whose name is a few words for a table.

    Validation, copies and streams are left out where no rank waits for them.
    """
    found = bubbles(timeline)
    words = dict(BUBBLE_WORDS)
    if not timeline.schedule.has_post_validation:
        del words["waiting_for_validation"]
    if not timeline.schedule.offloads:
        del words["waiting_for_copy"]
    if timeline.hardware_queues is None:
        del words["streams"]
    return {word: tuple(getattr(bubble, name) for bubble in found) for name, word in words.items()}


def _bubble(timeline: Timeline, where: _Positions, rank: int, begin: float, end: float) -> Bubble:
    if not timeline.lanes[rank]:
        return Bubble(end - begin, 0, 0, 0, 0, 0)
    ahead = num_ahead(timeline.lanes[rank])
    embeddings = sum(timed.end - timed.start for timed in timeline.lanes[rank][:ahead])
    lane = timeline.lanes[rank][ahead:]
    waiting: dict[str, float] = dict.fromkeys((facts.waiting for facts in KINDS.values() if facts.waiting), 0)
    communication: float = 0
    streams: float = 0
    brought = times_of_return(timeline, rank)
    for before, timed in pairwise(lane):
        gap = timed.start - before.end
        busy = 0 if timeline.overlap_communication else _busy_between(timeline, rank, before.op, timed.op)
        if timeline.hardware_queues is not None:
            arrival = max((time for time, _ in _arrivals(timeline, where, rank, timed.op)), default=before.end)
            in_line = gap - min(gap, max(0, arrival - before.end))
            streams += in_line
            gap -= in_line
        communication += busy
        if brought.get(timed.op) == timed.start:
            waiting["waiting_for_copy"] += gap - busy
            continue
        waiting[KINDS[timed.op.kind].waiting] += gap - busy
    return Bubble(
        warmup=lane[0].start - begin - embeddings,
        communication=communication,
        tail=end - lane[-1].end,
        streams=streams,
        **waiting,
    )


def _busy_between(timeline: Timeline, rank: int, before: Op, op: Op) -> float:
    """How long sending the result of `before` and receiving the input of `op` occupy the rank."""
    placement, costs = timeline.schedule.placement, timeline.costs
    sending = message_time(placement, costs, rank, send_after(placement, rank, before))
    return sending + message_time(placement, costs, rank, receive_before(placement, rank, op))


def critical_path(timeline: Timeline) -> tuple[tuple[int, TimedOp], ...]:
    """The chain of operations that makes the makespan as long as it is, as (rank, operation), first to last.

    Each operation could not start earlier because of the one before it: either its rank was busy with
    it, or its result was needed. Where both hold the chain stays on the rank. Waiting in line on NCCL's streams is
    not followed.
    """
    where = _positions(timeline)
    last = [(lane[-1].end, -rank) for rank, lane in enumerate(timeline.lanes) if lane]
    path: list[tuple[int, TimedOp]] = []
    at = (-max(last)[1], len(timeline.lanes[-max(last)[1]]) - 1) if last else None
    while at is not None:
        path.append((at[0], timeline.lanes[at[0]][at[1]]))
        at = _limited_by(timeline, where, *at)
    return tuple(reversed(path))


def messages(timeline: Timeline) -> Iterator[tuple[int, TimedOp, int, TimedOp]]:
    """(rank, the operation that made it, rank, the operation that uses it) of every tensor that crosses ranks."""
    where = _positions(timeline)
    for rank, lane in enumerate(timeline.lanes):
        for timed in lane:
            for arrival in arrivals(timeline.schedule, rank, timed.op):
                if not arrival.is_reduced:
                    source, position = where[arrival.node]
                    yield source, timeline.lanes[source][position], rank, timed


class Input(NamedTuple):
    """A result that an operation waits for."""

    rank: int
    position: int
    """Place of the operation that makes it, in its rank's lane."""
    arrival: float
    """When it is there, or if messages occupy the ranks, when it is made."""


def inputs(timeline: Timeline) -> tuple[tuple[tuple[Input, ...], ...], ...]:
    """For every rank and each of its operations, in the order of the lane, the results that it waits for."""
    where = _positions(timeline)
    return tuple(
        tuple(_inputs(timeline, where, rank, timed.op) for timed in lane) for rank, lane in enumerate(timeline.lanes)
    )


def _inputs(timeline: Timeline, where: _Positions, rank: int, op: Op) -> tuple[Input, ...]:
    places = dict.fromkeys(where[node] for node in dependencies(timeline.schedule, rank, op))
    times = {at: timeline.lanes[at[0]][at[1]].end for at in places}
    times.update({at: time for time, at in _arrivals(timeline, where, rank, op)})
    return tuple(Input(*at, time) for at, time in times.items())


def _limited_by(timeline: Timeline, where: _Positions, rank: int, position: int) -> tuple[int, int] | None:
    """(rank, position) of the operation that the one at `position` of `rank` had to wait for longest."""
    placement, costs, overlap = timeline.schedule.placement, timeline.costs, timeline.overlap_communication
    candidates: list[tuple[float, tuple[int, int]]] = []
    if position > 0:
        before = timeline.lanes[rank][position - 1]
        sending = 0 if overlap else message_time(placement, costs, rank, send_after(placement, rank, before.op))
        candidates.append((before.end + sending, (rank, position - 1)))
    candidates += _arrivals(timeline, where, rank, timeline.lanes[rank][position].op)
    latest = max((time for time, _ in candidates), default=0)
    return next((at for time, at in candidates if time == latest), None)


def _arrivals(timeline: Timeline, where: _Positions, rank: int, op: Op) -> Iterator[tuple[float, tuple[int, int]]]:
    """Yield, for each result that `op` needs from another rank, its earliest arrival and the maker's place."""
    for arrival in arrivals(timeline.schedule, rank, op):
        source, at = where[arrival.node]
        overlaps = timeline.overlap_communication or arrival.is_reduced
        yield timeline.lanes[source][at].end + (arrival.time(timeline.costs) if overlaps else 0), (source, at)


_Positions = dict[Node, tuple[int, int]]
"""Where every operation is: (rank, position)."""


def _positions(timeline: Timeline) -> _Positions:
    placement = timeline.schedule.placement
    where: _Positions = {}
    for rank, lane in enumerate(timeline.lanes):
        in_pairs = forwards_in_pairs(timeline.schedule, rank)
        for position, timed in enumerate(lane):
            made_at = rank, position + (timed.op in in_pairs)
            where.update(dict.fromkeys(nodes_of(placement, rank, timed.op), made_at))
    return where


Steps = list[tuple[float, float]]
"""A step function as points (time, value): each value holds from its time until the next."""


def idle_ranks_over_time(timeline: Timeline) -> Steps:
    """How many ranks do not compute, over time."""
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
    """Memory in use by the operations of `rank` over time, in the unit of the costs."""
    steps: Steps = [(0, 0)]
    held = timeline.memory_held(rank)
    for timed, (_, during, after) in zip(timeline.lanes[rank], held, strict=True):
        if steps[-1][0] == timed.start:
            steps.pop()  # released and allocated at the same moment
        steps += [(timed.start, during), (timed.end, after)]
    return steps
