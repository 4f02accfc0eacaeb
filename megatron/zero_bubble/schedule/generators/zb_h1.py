"""ZB-H1: 1F1B with W split from B; no rank needs more memory than rank 0 of 1F1B."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generate ZB-H1: 1F1B with W split from B. On rank r (from 0), each W comes r microbatches after its B.

    A rank sends the result of each B before running W, and the delayed W fill the cooldown. The bubble is (p-1)(F+B-W).
    The peak memory of rank r is (p-r) M_B + r M_W, where one microbatch takes the memory M_B on a rank from F to B, and
    M_W from B to W. Source: Qi et al. 2024, arXiv 2401.10241, section 2.3.1.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches of an iteration.
    """
    return replace(split_backward(one_f_one_b(num_ranks, num_microbatches), delay=1), name="zb-h1")


def split_backward(schedule: Schedule, delay: int) -> Schedule:
    """Split every BW into a B at the same position and a W; on rank r (from 0), W comes `delay` * r backwards later.

    After its last B, a rank runs its remaining W. When rank r starts a forward, at most `delay` * r completed B still
    lack their W.

    Args:
        schedule: schedule with fused backwards (BW).
        delay: number of backwards between a B and its W on rank 1.
    """
    ranks = []
    for rank, ops in enumerate(schedule.ops):
        split: list[Op] = []
        waiting: list[Op] = []
        for op in ops:
            if op.kind is not OpKind.BW:
                split.append(op)
                continue
            split.append(op._replace(kind=OpKind.B))
            waiting.append(op._replace(kind=OpKind.W))
            if len(waiting) > delay * rank:
                split.append(waiting.pop(0))
        ranks.append((*split, *waiting))
    return replace(schedule, ops=tuple(ranks))
