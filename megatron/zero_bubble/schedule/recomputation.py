"""Recomputation: the choice of microbatches with the operation R, and the passes that insert and remove R."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import BACKWARDS, OpKind


class Recompute(str, Enum):
    """The choice of the microbatches with an R (recomputation). If a microbatch has an R, its F drops activations."""

    NONE = "none"
    """No microbatch is recomputed: every F keeps its activations."""
    FULL = "full"
    """Every microbatch has an R (recomputation), unless the backward of the microbatch directly follows its F."""
    PLANNED = "planned"
    """Within the memory limit, the planner chooses the microbatches with an R (recomputation)."""

    __str__ = str.__str__


def recomputes_blocks(settings: Any) -> bool:
    """Whether a model recomputes whole blocks of layers, so that recomputation (R) can be separated from the backward.

    With fp8 or fp4, Transformer Engine recomputes inside of its backward, so that R cannot be a separate operation.

    Args:
        settings: flags of a job, or megatron-core's config. Older versions of megatron-core's config have no `fp4`.
    """
    return settings.recompute_granularity == "full" and not settings.fp8 and not getattr(settings, "fp4", None)


def with_recomputation(schedule: Schedule) -> Schedule:
    """Insert an R (recomputation) right before every backward of a schedule, and remove communication.

    R does not need the gradient from the next stage, and runs while the gradient is in flight. R needs no more memory
    than a recomputation inside of the backward, because no operation runs between R and the backward. A microbatch
    whose backward directly follows its F gets no R, because R would take time and save no memory.
    """
    schedule = without_recomputation(schedule)
    return replace(schedule, ops=tuple(tuple(_with_recomputation(ops)) for ops in schedule.ops))


def with_recomputation_everywhere(schedule: Schedule) -> Schedule:
    """Insert R like `with_recomputation`, but with at least one R on every stage, to measure the costs of R.

    A stage without an R gets an R for its first microbatch. The returned schedule has the lowest peak memory that is
    possible with at least one R on every stage. A model can therefore be measured even if its activations do not fit in
    memory without recomputation.
    """
    groups, schedule = schedule.groups, with_recomputation(schedule)
    ranks = [list(ops) for ops in schedule.ops]
    for ops in ranks:
        recomputed = {op.chunk for op in ops if op.kind is OpKind.R}
        for chunk in set(range(schedule.num_chunks)) - recomputed:
            first = next(k for k, op in enumerate(ops) if op.kind in BACKWARDS and op.chunk == chunk)
            ops.insert(first, ops[first]._replace(kind=OpKind.R))
    return replace(schedule, ops=tuple(map(tuple, ranks)), groups=groups)


def without_recomputation(schedule: Schedule) -> Schedule:
    """The given schedule without communication and without recomputation: every F keeps its activations."""
    return replace(schedule.without({OpKind.R}), groups=())


def num_recomputed(schedule: Schedule) -> int:
    """The number of recomputations (R) on all ranks of a schedule."""
    return sum(op.kind is OpKind.R for ops in schedule.ops for op in ops)


def _with_recomputation(ops: Sequence[Op]) -> Iterator[Op]:
    before: Op | None = None
    for op in ops:
        kind, microbatch, chunk = op
        if kind in BACKWARDS and before != (OpKind.F, microbatch, chunk):
            yield Op(OpKind.R, microbatch, chunk)
        yield op
        before = op
