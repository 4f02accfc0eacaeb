"""ZB-H2: no bubble if F, B and W take the same time, at about twice the peak memory of 1F1B."""

from __future__ import annotations

from megatron.zero_bubble.schedule.generators.one_f_one_b import with_warmups
from megatron.zero_bubble.schedule.generators.zb_h1 import split_backward
from megatron.zero_bubble.schedule.ir import Schedule


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generate ZB-H2: 1F1B with twice the warmup. On rank r (from 0), each W comes 2r microbatches after its B.

    The long warmup removes the wait for the first B. All ranks have the same span, but later ranks start and end later.
    Because later ranks end later, an optimizer step that synchronizes the ranks would lengthen the iteration. The
    bubble is (p-1)(F+B-2W). The peak memory of rank r is (2p-2r-1) M_B + 2r M_W, where one microbatch takes the memory
    M_B on a rank from F to B, and M_W from B to W. Source: Qi et al. 2024, arXiv 2401.10241, section 2.3.2.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches of an iteration.
    """
    warmups = reversed(range(0, 2 * num_ranks, 2))
    return split_backward(with_warmups("zb-h2", num_microbatches, warmups), delay=2)
