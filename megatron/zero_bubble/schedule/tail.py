"""Reorders the last W's of every rank by parameter, so that reducing gradients over replicas overlaps with computing.

The gradient of a parameter can be reduced over the data-parallel replicas once its last W is done. In microbatch order
that is the very last W for all parameters alike. The W's after a rank's last B depend on nothing any more, so they can
be done parameter by parameter: all microbatches of one, which is reduced while the next one's are computed ("Zero
Bubble Pipeline Parallelism", appendix A). The terms of each gradient are added in the same order as before, so that no
bit changes. A rank with a vocabulary shard runs its last T's before these W's and its last EW's, which wait for the
first rank, after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import COLLECTIVES, KINDS, OpKind
from megatron.zero_bubble.schedule.pairs import computations

_GRADIENTS = frozenset(kind for kind, facts in KINDS.items() if facts.adds_gradient and OpKind.B not in facts.makes)
"""The operations that compute gradients of weights alone."""
_LAST_COLLECTIVES = frozenset(kind for kind, collective in COLLECTIVES.items() if collective.maker is OpKind.B)
"""The collectives to which only a backward contributes; they also occur among the last gradients."""


def reorder_tail(schedule: Schedule) -> Schedule:
    """The same schedule, lowered or not, with a rank's last W's chunk by chunk, the last chunk first.

    Neither times nor peak memory grow: a W or T in the tail waits for nobody, and no operation there allocates.
    Communication stays where it is.
    """
    return replace(schedule, ops=tuple(_reorder(ops) for ops in schedule.ops))


def _reorder(ops: Sequence[Op]) -> tuple[Op, ...]:
    start, end = _tail(ops)
    gradients = iter(sorted((op for op in ops[start:end] if op.kind in _GRADIENTS), key=_turn))
    reordered = (next(gradients) if op.kind in _GRADIENTS else op for op in ops[start:end])
    return (*ops[:start], *reordered, *ops[end:])


def _turn(op: Op) -> tuple[int, int, int]:
    """The key that orders the last gradients: T, W from the last chunk to the first, EW."""
    return (OpKind.T, OpKind.W, OpKind.EW).index(op.kind), -op.chunk, op.microbatch


def _tail(ops: Sequence[Op]) -> tuple[int, int]:
    """Where the last gradients of a rank begin and end. The optimizer's STEP may follow them."""
    end = len(ops) - sum(op.kind is OpKind.STEP for op in ops[-1:])
    start = end
    while start > 0 and ops[start - 1].kind in _GRADIENTS | _LAST_COLLECTIVES:
        start -= 1
    return start, end


def run_together(ops: Sequence[Op]) -> list[tuple[Op, ...]]:
    """The operations of a rank; those that run as one are together: pairs, and W's of one chunk at the end."""
    start, end = _tail(ops)

    def key(numbered: tuple[int, Op]) -> tuple[bool, int]:
        position, op = numbered
        return (True, op.chunk) if op.kind is OpKind.W else (False, position)

    groups = (tuple(op for _, op in group) for _, group in groupby(enumerate(ops[start:end]), key=key))
    return [*computations(ops[:start]), *groups, *((op,) for op in ops[end:])]
