"""1F1B, also called PipeDream-flush: what Megatron runs with one chunk a rank."""

from __future__ import annotations

from megatron.zero_bubble.schedule.generators.patterns import alternate
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """As many F as there are ranks after this one, then one F and one backward in turn, then the backwards left.

    Bubble (p-1)(F+B+W), peak memory of worker i (from 1) (p-i+1) M_B. Source: Narayanan et al. 2021,
    arXiv 2104.04473.
    """
    forwards = [Op(OpKind.F, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Op(OpKind.BW, microbatch) for microbatch in range(num_microbatches)]
    ops = tuple(alternate(forwards, backwards, num_ranks - 1 - rank) for rank in range(num_ranks))
    return Schedule("1f1b", Placement("linear", num_ranks), num_microbatches, ops)
