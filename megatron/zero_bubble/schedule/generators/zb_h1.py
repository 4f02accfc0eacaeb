"""ZB-H1: 1F1B with W split from B, in the memory of 1F1B."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generate ZB-H1: 1F1B with W split from B. On rank r (from 0), each W comes r microbatches after its B.

    A rank sends the result of each B before running W, and the delayed W fill the cooldown. The bubble is (p-1)(F+B-W),
    and the peak memory of rank r is (p-r) M_B + r M_W. Source: Qi et al. 2024, arXiv 2401.10241, section 2.3.1.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches of an iteration.
    """
    fused = one_f_one_b(num_ranks, num_microbatches)
    ops = tuple(split_backward(fused.ops[rank], delay=rank) for rank in range(num_ranks))
    return Schedule("zb-h1", Placement("linear", num_ranks), num_microbatches, ops)


def split_backward(ops: Sequence[Op], delay: int) -> tuple[Op, ...]:
    """Split every BW into a B at the same position and a W `delay` backwards later; the last W come at the end.

    When the rank starts a forward, at most `delay` microbatches have completed B but not W.

    Args:
        ops: operations of a rank, in order.
        delay: number of backwards between a B and its W.
    """
    split: list[Op] = []
    waiting: list[Op] = []
    for op in ops:
        if op.kind is not OpKind.BW:
            split.append(op)
            continue
        split.append(Op(OpKind.B, op.microbatch, op.chunk))
        waiting.append(Op(OpKind.W, op.microbatch, op.chunk))
        if len(waiting) > delay:
            split.append(waiting.pop(0))
    return (*split, *waiting)
