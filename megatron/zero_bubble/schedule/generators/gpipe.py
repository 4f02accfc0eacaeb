"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from megatron.zero_bubble.schedule.generators.one_f_one_b import with_warmups
from megatron.zero_bubble.schedule.ir import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generate GPipe: every rank runs F of all microbatches, then BW of all microbatches.

    With p ranks and m microbatches, the bubble is (p-1)(F+B+W), and the peak memory is m M_B, where M_B is the
    activation memory of one microbatch on a rank. The backwards are in microbatch order, so that gradients add up in
    the same order as in all other schedules. In the paper (Huang et al. 2019, arXiv 1811.06965), the backwards are in
    reverse order.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches m.
    """
    return with_warmups("gpipe", num_microbatches, [num_microbatches] * num_ranks)
