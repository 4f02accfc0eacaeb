"""Which compute operation receives and sends which message: the one place that knows, for every pass."""

from __future__ import annotations

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import BACKWARDS, Op, OpKind, Placement


def receive_before(placement: Placement, rank: int, op: Op) -> Op | None:
    """The receive that brings the compute operation `op` of `rank` its input, if that comes from another rank."""
    stage = placement.stage_of(rank, op.chunk)
    if op.kind is OpKind.F:
        return _if_remote(placement, rank, stage - 1, op, OpKind.RECV_FORWARD)
    if op.kind in BACKWARDS:
        return _if_remote(placement, rank, stage + 1, op, OpKind.RECV_BACKWARD)
    return None


def send_after(placement: Placement, rank: int, op: Op) -> Op | None:
    """The send that carries the result of the compute operation `op` of `rank` away, if another rank wants it."""
    stage = placement.stage_of(rank, op.chunk)
    if op.kind is OpKind.F:
        return _if_remote(placement, rank, stage + 1, op, OpKind.SEND_FORWARD)
    if op.kind in BACKWARDS:
        return _if_remote(placement, rank, stage - 1, op, OpKind.SEND_BACKWARD)
    return None


def other_end(placement: Placement, rank: int, send: Op) -> tuple[int, Op]:
    """The rank that receives what `rank` sends with `send`, and the receive that it runs."""
    forward = send.kind is OpKind.SEND_FORWARD
    target = placement.stage_of(rank, send.chunk) + (1 if forward else -1)
    kind = OpKind.RECV_FORWARD if forward else OpKind.RECV_BACKWARD
    return placement.rank_of(target), Op(kind, send.microbatch, placement.chunk_of(target))


def message_time(placement: Placement, costs: StageCosts, rank: int, message: Op | None) -> float:
    """How long `message`, a send or receive of `rank`, is on its way; 0 where there is none."""
    if message is None:
        return 0
    stage = placement.stage_of(rank, message.chunk)
    towards_last = message.kind in (OpKind.SEND_FORWARD, OpKind.RECV_BACKWARD)
    return costs.time_comm[stage if towards_last else stage - 1]


def input_time(placement: Placement, costs: StageCosts, rank: int, op: Op) -> float:
    """How long what the compute operation `op` of `rank` needs from other ranks is on its way; 0 if it needs nothing.

    The state of all gradients, which VALIDATE needs, takes as long as the slowest message.
    """
    if op.kind is OpKind.VALIDATE:
        return max(costs.time_comm, default=0)
    return message_time(placement, costs, rank, receive_before(placement, rank, op))


def _if_remote(placement: Placement, rank: int, neighbour: int, op: Op, kind: OpKind) -> Op | None:
    """A message of `kind` for `op`, unless the stage `neighbour` does not exist or is on the same rank."""
    if not 0 <= neighbour < placement.num_stages or placement.rank_of(neighbour) == rank:
        return None
    return Op(kind, op.microbatch, op.chunk)
