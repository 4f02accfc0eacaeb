"""Measures how long each stage of a running pipeline computes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.pipeline.layer_costs import LayerTimes
from megatron.zero_bubble.runtime.profiler import Profiler
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import OpKind, Placement


def stage_times(ops: Sequence[MeasuredOp], placement: Placement, rank: int) -> dict[int, LayerTimes]:
    """Return the median times of one microbatch for each stage of `rank`, from the operations of a step.

    Where B and W are one operation, or a layer runs again in R, that time counts as B's.
    """
    profiler = Profiler(placement, rank)
    profiler.add(ops)
    times_of = {}
    for costs in profiler.costs():
        seconds = {kind: milliseconds / 1000 for kind, milliseconds in costs.times.items()}
        backward = sum(seconds.get(kind, 0.0) for kind in (OpKind.B, OpKind.BW, OpKind.R))
        times_of[costs.stage] = LayerTimes(seconds[OpKind.F], backward, seconds.get(OpKind.W, 0.0))
    return times_of
