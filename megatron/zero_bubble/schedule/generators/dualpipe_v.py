"""DualPipeV: two chunks per rank in a V-shaped placement, and pairs of a forward and a backward (`schedule.pairs`)."""

from __future__ import annotations

from collections import deque
from itertools import count

from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Generate DualPipeV as DeepSeek published it.

    A pair runs a forward and a backward as one operation. For one chunk, let FB be the time of a pair, W the time of W,
    and BW the time of B and W together. If B takes as long as F, the bubble with p ranks is (p-1)(FB + BW - 3W). The
    peak memory is (p + 1/2) M_B, where M_B is the activation memory of one microbatch on both chunks of a rank. Source:
    DeepSeek-V3, arXiv 2412.19437, and DeepSeek's repository DualPipe.

    Args:
        num_ranks: number of ranks p.
        num_microbatches: number of microbatches, at least 2p.

    Raises:
        ScheduleError: `num_microbatches` is less than twice `num_ranks`.
    """
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"schedule dualpipe-v needs at least {2 * num_ranks} microbatches, two for every rank, "
            f"got {num_microbatches}"
        )
    lanes = (tuple(_Lane(num_ranks, num_microbatches, rank).ops) for rank in range(num_ranks))
    return Schedule("dualpipe-v", Placement("v", num_ranks, 2), num_microbatches, tuple(lanes))


class _Lane:
    """Builds the operations of one rank in the order of the phases of DualPipeV."""

    def __init__(self, num_ranks: int, num_microbatches: int, rank: int) -> None:
        before, after = rank + 1, num_ranks - 1 - rank
        self.ops: list[Op] = []
        self._next = {kind: (count(), count()) for kind in (OpKind.F, OpKind.B)}
        self._pending: deque[Op] = deque()
        for _ in range(2 * after):
            self._forward(0)
        for _ in range(before):
            self._forward(0)
            self._forward(1)
        for _ in range(after):
            self._backward(OpKind.B, 1)
            self._weight()
            self._forward(1)
        for number in range(num_microbatches - 2 * num_ranks + before):
            self._forward(0)
            # On the last rank the first backward needs the result of the preceding forward, so that these two
            # operations cannot be a pair.
            self._backward(OpKind.BW if number == 0 and after == 0 else OpKind.PBW, 1)
            self._forward(1)
            self._backward(OpKind.PBW, 0)
        for _ in range(after):
            self._backward(OpKind.BW, 1)
            self._forward(1)
            self._backward(OpKind.PBW, 0)
        for number in range(2 * before):
            self._backward(OpKind.B if number >= before else OpKind.BW, 1 - number % 2)
        for _ in range(after):
            self._weight()
            self._backward(OpKind.B, 0)
        for _ in range(before):
            self._weight()

    def _forward(self, chunk: int) -> None:
        self.ops.append(Op(OpKind.F, next(self._next[OpKind.F][chunk]), chunk))

    def _backward(self, kind: OpKind, chunk: int) -> None:
        op = Op(kind, next(self._next[OpKind.B][chunk]), chunk)
        self.ops.append(op)
        if kind is OpKind.B:
            self._pending.append(op._replace(kind=OpKind.W))

    def _weight(self) -> None:
        self.ops.append(self._pending.popleft())
