"""1F1B, also called PipeDream-flush: what Megatron runs with one chunk a rank."""

from __future__ import annotations

from megatron.zero_bubble.schedule.ir import Op, OpKind, Placement, Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """As many F as there are ranks after this one, then one F and one backward in turn, then the backwards left.

    Bubble (p-1)(F+B+W), peak memory of worker i (from 1) (p-i+1) M_B. Source: Narayanan et al. 2021,
    arXiv 2104.04473.
    """
    ops = tuple(_rank_ops(num_ranks - 1 - rank, num_microbatches) for rank in range(num_ranks))
    return Schedule("1f1b", Placement("linear", num_ranks), num_microbatches, ops)


def _rank_ops(num_warmup: int, num_microbatches: int) -> tuple[Op, ...]:
    ops = [Op(OpKind.F, microbatch) for microbatch in range(min(num_warmup, num_microbatches))]
    for microbatch in range(num_microbatches):
        if microbatch + num_warmup < num_microbatches:
            ops.append(Op(OpKind.F, microbatch + num_warmup))
        ops.append(Op(OpKind.BW, microbatch))
    return tuple(ops)
