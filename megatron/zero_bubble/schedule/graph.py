"""Dependencies of operations, and messages between ranks.

An operation is named here by its stage, not by its rank and chunk: see `Node`. The table `KINDS` lists the needs and
messages of each kind; this module derives the stages and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import MAX_STAGES, Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, KINDS, MESSAGES, Need, OpKind, Place

Node = tuple[OpKind, int, int]
"""The result of an operation: (result, stage, microbatch). Results are named as in `KindFacts.makes`."""


class Arrival(NamedTuple):
    """A result that an operation needs from another rank."""

    node: Node
    edge: int | None
    """Number of the edge that the message crosses, the stage before it; None if no message brings the result."""

    @property
    def is_reduced(self) -> bool:
        """Whether all ranks reduce the result in the background, and no message occupies them."""
        return self.edge is None

    def time(self, costs: StageCosts) -> float:
        """How long the result is on its way."""
        return collective_time(costs) if self.edge is None else costs.time_comm[self.edge]


def nodes_of(placement: Placement, rank: int, op: Op) -> list[Node]:
    """The results that the compute operation `op` of `rank` makes."""
    stage = placement.stage_of(rank, op.chunk)
    return [(result, stage, op.microbatch) for result in KINDS[op.kind].makes]


class Source(NamedTuple):
    """Where the operations of one kind in one stage find something that they need."""

    need: Need
    stage: int
    """The stage that makes the result."""
    is_remote: bool
    """Whether that stage is on another rank."""
    edge: int | None
    """As in `Arrival`; it means something only if the stage is remote."""


@lru_cache(maxsize=MAX_STAGES)
def sources(placement: Placement, kind: OpKind, stage: int) -> tuple[Source, ...]:
    """The sources on which the operations of `kind` in `stage` depend; they are the same for every microbatch."""
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


def dependencies(schedule: Schedule, rank: int, op: Op) -> list[Node]:
    """The results that have to be there before the compute operation `op` of `rank` can start."""
    return [node for _, node in _needed(schedule, rank, op)]


def arrivals(schedule: Schedule, rank: int, op: Op) -> list[Arrival]:
    """The results among `dependencies` that other ranks make."""
    return [Arrival(node, source.edge) for source, node in _needed(schedule, rank, op) if source.is_remote]


def _needed(schedule: Schedule, rank: int, op: Op) -> Iterator[tuple[Source, Node]]:
    for source in sources(schedule.placement, op.kind, schedule.placement.stage_of(rank, op.chunk)):
        microbatch = op.microbatch - source.need.num_before
        if microbatch >= 0 and (
            not source.need.is_optional or _is_made(schedule, source.stage, source.need, microbatch)
        ):
            yield source, (source.need.result, source.stage, microbatch)


_NEIGHBOURS = {Place.SAME_STAGE: 0, Place.STAGE_BEFORE: -1, Place.STAGE_AFTER: 1}
"""Place -> distance in stages from the operation's own stage."""


def _stages_at(placement: Placement, stage: int, place: Place) -> list[int]:
    """The stages at `place`, relative to `stage`. A rank is given as the stage of its first chunk."""
    if place in _NEIGHBOURS:
        source = stage + _NEIGHBOURS[place]
        return [source] if 0 <= source < placement.num_stages else []
    if place is Place.ALL_RANKS:
        return [placement.stage_of(rank) for rank in range(placement.num_ranks)]
    last = placement.num_stages - 1
    return [
        {
            Place.FIRST_STAGE: 0,
            Place.LAST_STAGE: last,
            Place.FIRST_RANK: placement.stage_of(placement.rank_of(0)),
            Place.LAST_RANK: placement.stage_of(placement.rank_of(last)),
        }[place]
    ]


def _is_made(schedule: Schedule, stage: int, need: Need, microbatch: int) -> bool:
    """Whether the schedule has an operation that makes this result alone."""
    placement = schedule.placement
    op = Op(need.result, microbatch, placement.chunk_of(stage))
    return op in schedule.op_sets[placement.rank_of(stage)]


def receive_before(placement: Placement, rank: int, op: Op) -> Op | None:
    """The receive that brings the compute operation `op` of `rank` its input, if that comes from another rank."""
    return _if_remote(placement, rank, op, KINDS[op.kind].receives)


def send_after(placement: Placement, rank: int, op: Op) -> Op | None:
    """The send that carries the result of the compute operation `op` of `rank` away, if another rank wants it."""
    return _if_remote(placement, rank, op, KINDS[op.kind].sends)


def _if_remote(placement: Placement, rank: int, op: Op, kind: OpKind | None) -> Op | None:
    """A message of `kind` for `op`, unless the stage at its other end does not exist or is on the same rank."""
    if kind is None:
        return None
    neighbour = placement.stage_of(rank, op.chunk) + MESSAGES[kind].neighbour
    if not 0 <= neighbour < placement.num_stages or placement.rank_of(neighbour) == rank:
        return None
    return Op(kind, op.microbatch, op.chunk)


def other_end(placement: Placement, rank: int, send: Op) -> tuple[int, Op]:
    """The rank that receives what `rank` sends with `send`, and the receive that it runs."""
    message = MESSAGES[send.kind]
    target = placement.stage_of(rank, send.chunk) + message.neighbour
    return placement.rank_of(target), Op(message.other_end, send.microbatch, placement.chunk_of(target))


def exchange_before(schedule: Schedule, rank: int, op: Op) -> Op | None:
    """The collective that brings the compute operation `op` of `rank` its input, if one does."""
    for kind in collective_kinds(schedule):
        collective = COLLECTIVES[kind]
        if collective.user is op.kind and _is_at(schedule.placement, rank, op, collective.users):
            made_here = collective.maker is op.kind and _is_at(schedule.placement, rank, op, collective.makers)
            return None if made_here else Op(kind, op.microbatch)
    return None


def exchanges_after(schedule: Schedule, rank: int, op: Op) -> tuple[Op, ...]:
    """The collectives that carry the result of the compute operation `op` of `rank` to other ranks."""
    return tuple(
        Op(kind, op.microbatch)
        for kind in collective_kinds(schedule)
        if COLLECTIVES[kind].maker in KINDS[op.kind].makes
        and _is_at(schedule.placement, rank, op, COLLECTIVES[kind].makers)
    )


def collective_kinds(schedule: Schedule) -> tuple[OpKind, ...]:
    """The kinds of collectives whose results `schedule` uses. Every microbatch has each once."""
    if not schedule.is_vocabulary_parallel:
        return ()
    return tuple(kind for kind, collective in COLLECTIVES.items() if collective.user in schedule.kinds)


def collective_time(costs: StageCosts) -> float:
    """How long an exchange between all ranks takes: as long as the slowest message."""
    return max(costs.time_comm, default=0)


def _is_at(placement: Placement, rank: int, op: Op, place: Place) -> bool:
    stage = placement.stage_of(rank, op.chunk)
    return stage in _stages_at(placement, stage, place)


def message_time(placement: Placement, costs: StageCosts, rank: int, message: Op | None) -> float:
    """How long `message`, a send or receive of `rank`, is on its way; 0 where there is none."""
    if message is None:
        return 0
    stage = placement.stage_of(rank, message.chunk)
    return costs.time_comm[min(stage, stage + MESSAGES[message.kind].neighbour)]


def circle(waits_for: Mapping[int, int]) -> list[int]:
    """Return a circle of ranks that wait for each other, or the chain of waiting ranks if there is no circle.

    `waits_for` maps each waiting rank to the rank that it waits for.
    """
    rank = min(waits_for)
    path: list[int] = []
    while rank in waits_for and rank not in path:
        path.append(rank)
        rank = waits_for[rank]
    return path[path.index(rank) :] if rank in path else path
