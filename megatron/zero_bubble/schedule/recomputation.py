"""Which microbatches are recomputed, and the pass that gives each of them its R."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import BACKWARDS, OpKind


class Recompute(str, Enum):
    """Recomputation in schedules: F drops the activations of every microbatch that has an R."""

    NONE = "none"
    """Nothing: every F keeps its activations."""
    FULL = "full"
    """Every microbatch, except where its backward follows its F at once."""
    PLANNED = "planned"
    """Only the microbatches for which the memory limit leaves no room."""

    __str__ = str.__str__


def recomputes_blocks(settings: Any) -> bool:
    """Tell whether a model recomputes blocks of layers, in full, that can be split off its backward as R.

    With fp8 and fp4 only Transformer Engine's own backward can recompute.

    Args:
        settings: a job's flags, or megatron-core's config, which has no `fp4` in older versions.
    """
    return settings.recompute_granularity == "full" and not settings.fp8 and not getattr(settings, "fp4", None)


def with_recomputation(schedule: Schedule) -> Schedule:
    """The same schedule, without communication, with an R right before every backward.

    R needs nothing from the next stage, so that it runs while the gradient is still on its way. It takes no more memory
    than a recomputation within the backward, because its rank runs nothing in between. A microbatch whose backward
    follows its F at once keeps its activations, which costs no more memory than R would and saves its time.
    """
    schedule = without_recomputation(schedule)
    return replace(schedule, ops=tuple(tuple(_with_recomputation(ops)) for ops in schedule.ops))


def with_recomputation_everywhere(schedule: Schedule) -> Schedule:
    """The same schedule, without communication, with recomputations that measure the costs of R on every stage.

    Like `with_recomputation`; a stage without any R then has one for its first microbatch. Whatever else R is placed
    for takes at least this memory, so that a run can measure what it may not be able to keep.
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
    """The same schedule, without communication, R and groups: every F keeps its activations."""
    ranks = (schedule.compute_ops(rank) for rank in range(schedule.num_ranks))
    kept = tuple(tuple(op for op in ops if op.kind is not OpKind.R) for ops in ranks)
    return replace(schedule, ops=kept, groups=())


def num_recomputed(schedule: Schedule) -> int:
    """How many R the ranks of a schedule run together."""
    return sum(op.kind is OpKind.R for ops in schedule.ops for op in ops)


def _with_recomputation(ops: Sequence[Op]) -> Iterator[Op]:
    before: Op | None = None
    for op in ops:
        kind, microbatch, chunk = op
        if kind in BACKWARDS and before != (OpKind.F, microbatch, chunk):
            yield Op(OpKind.R, microbatch, chunk)
        yield op
        before = op
