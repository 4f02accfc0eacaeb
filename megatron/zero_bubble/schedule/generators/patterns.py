"""Two patterns on the operations of one rank that the handcrafted schedules share."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.schedule.ir import Op
from megatron.zero_bubble.schedule.kinds import OpKind


def alternate(forwards: Sequence[Op], backwards: Sequence[Op], num_warmup: int) -> tuple[Op, ...]:
    """`num_warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ops = list(forwards[:num_warmup])
    for k, backward in enumerate(backwards):
        ops += forwards[num_warmup + k : num_warmup + k + 1]
        ops.append(backward)
    return tuple(ops)


def split_backward(ops: Sequence[Op], delay: int) -> tuple[Op, ...]:
    """Every BW as a B in its place and a W that stands `delay` backwards later; the last `delay` W fill the tail.

    The rank holds at most `delay` microbatches of a chunk between B and W when it starts a forward.
    """
    split: list[Op] = []
    waiting: list[Op] = []
    for op in ops:
        if op.kind is not OpKind.BW:
            split.append(op)
            continue
        split.append(op._replace(kind=OpKind.B))
        waiting.append(op._replace(kind=OpKind.W))
        if len(waiting) > delay:
            split.append(waiting.pop(0))
    return (*split, *waiting)
