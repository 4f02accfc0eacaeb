"""ZB-H2: no bubble for equal F, B and W, in about twice the memory of 1F1B."""

from __future__ import annotations

from megatron.zero_bubble.schedule.generators.one_f_one_b import alternate
from megatron.zero_bubble.schedule.generators.zb_h1 import split_backward
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Twice the warmup of 1F1B, so that the first B comes without a gap; rank r keeps W 2r microbatches behind B.

    All ranks have the same span, but the last one starts and ends later: the optimizer step must not
    synchronise them. Bubble (p-1)(F+B-2W), peak memory of worker i (from 1)
    (2p-2i+1) M_B + (2i-2) M_W. Source: Qi et al. 2024, arXiv 2401.10241, section 2.3.2.
    """
    forwards = [Op(OpKind.F, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Op(OpKind.BW, microbatch) for microbatch in range(num_microbatches)]
    ops = tuple(
        split_backward(alternate(forwards, backwards, num_warmup=2 * (num_ranks - 1 - rank)), delay=2 * rank)
        for rank in range(num_ranks)
    )
    return Schedule("zb-h2", Placement("linear", num_ranks), num_microbatches, ops)
