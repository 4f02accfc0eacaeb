"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Every rank runs the F of all microbatches, then the backwards, both in microbatch order.

    Bubble (p-1)(F+B+W), peak memory m M_B. The backwards go in microbatch order, and not the other way round
    as in the paper (Huang et al. 2019, arXiv 1811.06965), so that gradients add up in the order of
    all other schedules.
    """
    forwards = tuple(Op(OpKind.F, microbatch) for microbatch in range(num_microbatches))
    backwards = tuple(Op(OpKind.BW, microbatch) for microbatch in range(num_microbatches))
    ops = (forwards + backwards,) * num_ranks
    return Schedule("gpipe", Placement("linear", num_ranks), num_microbatches, ops)
