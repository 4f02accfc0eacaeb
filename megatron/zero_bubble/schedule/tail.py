"""Reorders the last W of every rank by parameter, so that the reduction of gradients over replicas overlaps with W.

The gradient of a parameter can be reduced over the data-parallel replicas after the last W of the parameter. If a rank
runs W in microbatch order until the end, every parameter has its last W at the end of the iteration. After the last B
of a rank, all remaining W have their inputs, so that these W can run parameter by parameter. The gradient of one
parameter is reduced while the W of the next parameter run ("Zero Bubble Pipeline Parallelism", appendix A). Reordering
W changes no bit of a gradient, because the terms of each gradient are still added in microbatch order. On a rank with a
vocabulary shard, the last weight gradients of the output layer (T) come before the last W. The last weight gradients of
the embedding (EW), which wait for the first rank, come after the last W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, KINDS, OpKind
from megatron.zero_bubble.schedule.pairs import computations

_GRADIENTS = frozenset(kind for kind, facts in KINDS.items() if facts.adds_gradient and OpKind.B not in facts.makes)
"""The kinds of operations that compute only gradients of weights."""
_LAST_COLLECTIVES = frozenset(kind for kind, collective in COLLECTIVES.items() if collective.maker is OpKind.B)
"""The kinds of collectives that carry results of B; a collective with results of B may come after a rank's last B."""


def reorder_tail(schedule: Schedule) -> Schedule:
    """On every rank, sort the last W by chunk, from the last chunk to the first.

    The makespan and the peak memory do not grow, because the last W and T wait for no other rank and allocate no
    memory. The reordering moves no send, receive or collective.
    """
    return replace(schedule, ops=tuple(_reorder(ops) for ops in schedule.ops))


def _reorder(ops: Sequence[Op]) -> tuple[Op, ...]:
    start, end = _tail(ops)
    gradients = iter(sorted((op for op in ops[start:end] if op.kind in _GRADIENTS), key=_turn))
    reordered = (next(gradients) if op.kind in _GRADIENTS else op for op in ops[start:end])
    return (*ops[:start], *reordered, *ops[end:])


def _turn(op: Op) -> tuple[int, int, int]:
    """Sort key of the last weight-gradient operations of a rank: T, W from the last chunk to the first, then EW."""
    return (OpKind.T, OpKind.W, OpKind.EW).index(op.kind), -op.chunk, op.microbatch


def _tail(ops: Sequence[Op]) -> tuple[int, int]:
    """(start, end): range of the positions of a rank's last weight gradients; only STEP may come after this range."""
    end = len(ops) - sum(op.kind is OpKind.STEP for op in ops[-1:])
    start = end
    while start > 0 and ops[start - 1].kind in _GRADIENTS | _LAST_COLLECTIVES:
        start -= 1
    return start, end


def run_together(ops: Sequence[Op]) -> list[tuple[Op, ...]]:
    """Group the operations that run together on a rank: the two operations of a pair, and the last W of one chunk."""
    start, end = _tail(ops)

    def key(numbered: tuple[int, Op]) -> tuple[bool, int]:
        position, op = numbered
        return (True, op.chunk) if op.kind is OpKind.W else (False, position)

    groups = (tuple(op for _, op in group) for _, group in groupby(enumerate(ops[start:end]), key=key))
    return [*computations(ops[:start]), *groups, *((op,) for op in ops[end:])]
