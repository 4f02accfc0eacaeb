"""The pattern that ZB-H1 and ZB-H2 share: 1F1B with a longer warmup and a delayed W."""

from __future__ import annotations

from megatron.zero_bubble.schedule.ir import Op, OpKind


def delayed_w_ops(num_warmup: int, delay: int, num_microbatches: int) -> tuple[Op, ...]:
    """The operations of one rank: `num_warmup` F, then F, B, W in turn with W `delay` microbatches behind B.

    When F runs out, B and W go on in turn; the last `delay` W fill the tail. The rank holds at most
    `num_warmup + 1` microbatches between F and B, and `delay` between B and W.
    """
    ops = [Op(OpKind.F, microbatch) for microbatch in range(min(num_warmup, num_microbatches))]
    for microbatch in range(num_microbatches):
        if microbatch + num_warmup < num_microbatches:
            ops.append(Op(OpKind.F, microbatch + num_warmup))
        ops.append(Op(OpKind.B, microbatch))
        if microbatch >= delay:
            ops.append(Op(OpKind.W, microbatch - delay))
    ops += [Op(OpKind.W, microbatch) for microbatch in range(max(0, num_microbatches - delay), num_microbatches)]
    return tuple(ops)
