"""1F1B, also called PipeDream-flush: what Megatron runs with one chunk a rank."""

from __future__ import annotations

from collections.abc import Sequence

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


def alternate(forwards: Sequence[Op], backwards: Sequence[Op], num_warmup: int) -> tuple[Op, ...]:
    """`num_warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ops = list(forwards[:num_warmup])
    for k, backward in enumerate(backwards):
        ops += forwards[num_warmup + k : num_warmup + k + 1]
        ops.append(backward)
    return tuple(ops)
