"""1F1B, also called PipeDream-flush, which Megatron runs if every rank has one model chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind

T = TypeVar("T")


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generate 1F1B: rank r (from 0) runs p-r-1 F, then F and BW alternately, then the remaining BW.

    The bubble is (p-1)(F+B+W), and the peak memory of rank r is (p-r) M_B, where M_B is the activation memory of one
    microbatch on a rank. Source: Narayanan et al. 2021, arXiv 2104.04473.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches of an iteration.
    """
    return with_warmups("1f1b", num_microbatches, reversed(range(num_ranks)))


def with_warmups(name: str, num_microbatches: int, warmups: Iterable[int]) -> Schedule:
    """Return a schedule with one chunk on each rank; rank r runs `warmups[r]` F, then F and BW alternately."""
    forwards = [Op(OpKind.F, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Op(OpKind.BW, microbatch) for microbatch in range(num_microbatches)]
    ops = tuple(alternate(forwards, backwards, warmup) for warmup in warmups)
    return Schedule(name, Placement("linear", len(ops)), num_microbatches, ops)


def alternate(forwards: Sequence[T], backwards: Sequence[T], num_warmup: int) -> tuple[T, ...]:
    """Return `num_warmup` forwards, then forwards and backwards alternately, then the remaining backwards."""
    ops = list(forwards[:num_warmup])
    for k, backward in enumerate(backwards):
        ops += forwards[num_warmup + k : num_warmup + k + 1]
        ops.append(backward)
    return tuple(ops)
