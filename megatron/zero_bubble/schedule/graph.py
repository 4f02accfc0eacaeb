"""Dependencies of operations, and messages between ranks.

The table `KINDS` lists the inputs and messages of each kind of operation. This module computes the stages and ranks
that make and use the results of operations. Results are identified by stage (see `Node`), not by rank and chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, TypeVar

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import MAX_STAGES, Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, KINDS, MESSAGES, Need, OpKind, Place

T = TypeVar("T")
Node = tuple[OpKind, int, int]
"""The result of an operation (see `KindFacts.makes`): (kind of result, stage, microbatch)."""


def nodes_of(placement: Placement, rank: int, op: Op) -> list[Node]:
    """The results of the compute operation `op` of `rank`."""
    stage = placement.stage_of(rank, op.chunk)
    return [(result, stage, op.microbatch) for result in KINDS[op.kind].makes]


class Source(NamedTuple):
    """An input that all operations of one kind in a stage need, and the stage that makes the input."""

    need: Need
    stage: int
    """The stage that makes the result."""
    is_remote: bool
    """Whether the stage that makes the result is on another rank."""
    edge: int | None
    """The smaller index of the two stages that make and need the result; None if a collective carries the result."""

    @property
    def is_reduced(self) -> bool:
        """Whether a collective of all ranks, instead of a message, brings the result."""
        return self.edge is None

    def transit(self, costs: StageCosts) -> float:
        """Time from the end of the operation that makes the result to the arrival of the result."""
        return collective_time(costs) if self.edge is None else costs.time_comm[self.edge]


@lru_cache(maxsize=MAX_STAGES)
def sources(placement: Placement, kind: OpKind, stage: int) -> tuple[Source, ...]:
    """The sources of all inputs of an operation of the given kind and stage; all microbatches have the same sources."""
    rank = placement.rank_of(stage)
    return tuple(
        Source(
            need, source, placement.rank_of(source) != rank, min(stage, source) if need.place in _NEIGHBOURS else None
        )
        for need in KINDS[kind].needs
        if need.only_at is None or stage in _stages_at(placement, stage, need.only_at)
        for source in _stages_at(placement, stage, need.place)
        if (need.result, source) != (kind, stage)
    )


def stages_of_kind(placement: Placement, kind: OpKind) -> Sequence[int]:
    """The stages that run operations of the given kind (see `KindFacts.runs_on`)."""
    runs_on = KINDS[kind].runs_on
    return range(placement.num_stages) if runs_on in _NEIGHBOURS else _stages_at(placement, 0, runs_on)


def dependencies(schedule: Schedule, rank: int, op: Op) -> list[Node]:
    """The results that the compute operation `op` of `rank` needs at its start."""
    return [node for _, node in _needed(schedule, rank, op)]


def arrivals(schedule: Schedule, rank: int, op: Op) -> list[tuple[Source, Node]]:
    """The results that the compute operation `op` of `rank` needs from other ranks, each with its source."""
    return [(source, node) for source, node in _needed(schedule, rank, op) if source.is_remote]


def _needed(schedule: Schedule, rank: int, op: Op) -> Iterator[tuple[Source, Node]]:
    for source in sources(schedule.placement, op.kind, schedule.placement.stage_of(rank, op.chunk)):
        microbatch = op.microbatch - source.need.num_before
        if microbatch >= 0 and (
            not source.need.is_optional or _is_made(schedule, source.stage, source.need, microbatch)
        ):
            yield source, (source.need.result, source.stage, microbatch)


_NEIGHBOURS = {Place.SAME_STAGE: 0, Place.STAGE_BEFORE: -1, Place.STAGE_AFTER: 1}
"""Place relative to an operation's stage -> index of the stage at this place minus index of the operation's stage."""


def _stages_at(placement: Placement, stage: int, place: Place) -> list[int]:
    """The indices of the stages that the value `place` denotes for an operation in `stage`.

    If `place` denotes ranks (the first, the last or all), `_stages_at` returns the stage of chunk 0 of each denoted
    rank.
    """
    if place in _NEIGHBOURS:
        source = stage + _NEIGHBOURS[place]
        return [source] if 0 <= source < placement.num_stages else []
    if place is Place.ALL_RANKS:
        return [placement.stage_of(rank) for rank in range(placement.num_ranks)]
    source = 0 if place in (Place.FIRST_STAGE, Place.FIRST_RANK) else placement.num_stages - 1
    is_rank = place in (Place.FIRST_RANK, Place.LAST_RANK)
    return [placement.stage_of(placement.rank_of(source)) if is_rank else source]


def _is_made(schedule: Schedule, stage: int, need: Need, microbatch: int) -> bool:
    """Whether the schedule has an operation of kind `need.result` with the given stage and microbatch."""
    placement = schedule.placement
    op = Op(need.result, microbatch, placement.chunk_of(stage))
    return op in schedule.op_sets[placement.rank_of(stage)]


def receive_before(placement: Placement, rank: int, op: Op) -> Op | None:
    """The receive for the input of `op`, a compute operation on `rank`; None if no other rank sends the input."""
    return _if_remote(placement, rank, op, KINDS[op.kind].receives)


def send_after(placement: Placement, rank: int, op: Op) -> Op | None:
    """The send for the result of `op`, a compute operation on `rank`; None if no send carries the result."""
    return _if_remote(placement, rank, op, KINDS[op.kind].sends)


def _if_remote(placement: Placement, rank: int, op: Op, kind: OpKind | None) -> Op | None:
    """The send or receive of the given kind for `op`; None if the neighbouring stage is missing or on the same rank."""
    if kind is None:
        return None
    neighbour = placement.stage_of(rank, op.chunk) + MESSAGES[kind].neighbour
    if not 0 <= neighbour < placement.num_stages or placement.rank_of(neighbour) == rank:
        return None
    return Op(kind, op.microbatch, op.chunk)


def other_end(placement: Placement, rank: int, send: Op) -> tuple[int, Op]:
    """(destination rank, receive on the destination rank) of the message that `rank` sends with `send`."""
    message = MESSAGES[send.kind]
    target = placement.stage_of(rank, send.chunk) + message.neighbour
    return placement.rank_of(target), Op(message.other_end, send.microbatch, placement.chunk_of(target))


def exchange_before(schedule: Schedule, rank: int, op: Op) -> Op | None:
    """The collective that brings the input of the compute operation `op` of `rank`; None if no collective brings an
    input.

    On the rank that broadcasts a result, an operation that uses the result does not wait for the broadcast.
    """
    placement = schedule.placement
    for kind in collective_kinds(schedule):
        collective = COLLECTIVES[kind]
        if collective.user is op.kind and is_at(placement, rank, op, collective.users):
            is_sum = collective.makers is Place.ALL_RANKS
            makers = {placement.rank_of(stage) for stage in _stages_at(placement, 0, collective.makers)}
            return Op(kind, op.microbatch) if is_sum or rank not in makers else None
    return None


def exchanges_after(schedule: Schedule, rank: int, op: Op) -> tuple[Op, ...]:
    """The collectives that carry the result of the compute operation `op` of `rank` to other ranks."""
    return tuple(
        Op(kind, op.microbatch)
        for kind in collective_kinds(schedule)
        if COLLECTIVES[kind].maker in KINDS[op.kind].makes
        and is_at(schedule.placement, rank, op, COLLECTIVES[kind].makers)
    )


def collective_kinds(schedule: Schedule) -> tuple[OpKind, ...]:
    """The kinds of collectives whose results `schedule` uses; every microbatch has one collective of each kind."""
    if not schedule.is_vocabulary_parallel:
        return ()
    return tuple(kind for kind, collective in COLLECTIVES.items() if collective.user in schedule.kinds)


def collective_time(costs: StageCosts) -> float:
    """Time of a collective of all ranks: `latency_collective` if above zero, else the time of the slowest message."""
    return max(costs.latency_collective) or max(costs.time_comm, default=0)


def is_at(placement: Placement, rank: int, op: Op, place: Place) -> bool:
    """Whether the operation `op` of `rank` belongs to a stage that the value `place` denotes."""
    stage = placement.stage_of(rank, op.chunk)
    return stage in _stages_at(placement, stage, place)


def message_time(placement: Placement, costs: StageCosts, rank: int, message: Op | None) -> float:
    """Time of `message`, a send, receive or collective of `rank`; 0 if `message` is None."""
    if message is None:
        return 0
    if message.kind in COLLECTIVES:
        return collective_time(costs)
    stage = placement.stage_of(rank, message.chunk)
    return costs.time_comm[min(stage, stage + MESSAGES[message.kind].neighbour)]


def per_kind(ops: Sequence[Op], make: Callable[[Op], T]) -> dict[tuple[OpKind, int], T]:
    """(kind, chunk) of the operations in `ops` -> result of `make` for the operation `Op(kind, 0, chunk)`."""
    return {(kind, chunk): make(Op(kind, 0, chunk)) for kind, chunk in set(map(itemgetter(0, 2), ops))}


def circle(waits_for: Mapping[int, int]) -> list[int]:
    """Return a cycle of ranks that wait for each other, or the chain of waiting ranks if there is no cycle.

    Args:
        waits_for: waiting rank -> awaited rank.
    """
    rank = min(waits_for)
    path: list[int] = []
    while rank in waits_for and rank not in path:
        path.append(rank)
        rank = waits_for[rank]
    return path[path.index(rank) :] if rank in path else path
