"""ZB-H1: 1F1B with B split from W, in no more memory than 1F1B."""

from __future__ import annotations

from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.generators.patterns import split_backward
from megatron.zero_bubble.schedule.ir import Placement, Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order of 1F1B; rank r (from 0) keeps W r microbatches behind B.

    A rank passes its B on before it runs W, and the delayed W fill the tail. Bubble (p-1)(F+B-W), peak
    memory of worker i (from 1) (p-i+1) M_B + (i-1) M_W. Source: Qi et al. 2024, arXiv 2401.10241, section 2.3.1.
    """
    fused = one_f_one_b(num_ranks, num_microbatches)
    ops = tuple(split_backward(fused.ops[rank], delay=rank) for rank in range(num_ranks))
    return Schedule("zb-h1", Placement("linear", num_ranks), num_microbatches, ops)
