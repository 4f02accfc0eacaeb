"""ZB-H1: 1F1B with B split from W, in no more memory than 1F1B."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order of 1F1B; rank r (from 0) keeps W r microbatches behind B.

    A rank passes its B on before it runs W, and the delayed W fill the tail. Bubble (p-1)(F+B-W), peak
    memory of worker i (from 1) (p-i+1) M_B + (i-1) M_W. Source: Qi et al. 2024, arXiv 2401.10241, section 2.3.1.
    """
    fused = one_f_one_b(num_ranks, num_microbatches)
    ops = tuple(split_backward(fused.ops[rank], delay=rank) for rank in range(num_ranks))
    return Schedule("zb-h1", Placement("linear", num_ranks), num_microbatches, ops)


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
        split.append(Op(OpKind.B, op.microbatch, op.chunk))
        waiting.append(Op(OpKind.W, op.microbatch, op.chunk))
        if len(waiting) > delay:
            split.append(waiting.pop(0))
    return (*split, *waiting)
