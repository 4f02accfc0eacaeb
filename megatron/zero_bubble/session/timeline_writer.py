"""Writes the drawings of `--zero-bubble-timeline`: the measured operations of one pipeline's ranks, and the plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import StageCosts, TimedOp
from megatron.zero_bubble.session.timeline_files import measured_timeline, write_timeline

_CLOCK_ROUNDS = 9


class TimelineWriter:
    """Records the operations of some iterations; global rank 0 writes those of its pipeline's ranks.

    Args:
        folder: the folder for the files, which is created if it is missing.
        first, last: the first and the last iteration to write.
        start: the iteration after which the job started; the observer counts from there.
    """

    def __init__(self, folder: str, first: int, last: int, start: int, forward_backward: ForwardBackward) -> None:
        self._folder = Path(folder)
        self._steps = range(first - start, last - start + 1)
        self._start = start
        self._source = forward_backward
        self._ops: Sequence[MeasuredOp] = ()
        self._offset: float | None = None
        forward_backward.observer.sinks.append(self._collect)

    def _collect(self, step: int, ops: Sequence[MeasuredOp]) -> None:
        if step in self._steps:
            self._ops = ops

    def after_iteration(self, iteration: int, num_microbatches: int) -> None:
        """Write the iteration if it is one of those to draw; a collective call of the pipeline of rank 0."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if iteration - self._start not in self._steps or 0 not in dist.get_process_group_ranks(group):
            return
        self._source.observer.flush()
        if self._offset is None:
            self._offset = clock_offset(group) - self._source.observer.lag()
        lane = [TimedOp(m.op, (m.start - self._offset) * 1000.0, (m.end - self._offset) * 1000.0) for m in self._ops]
        lanes: list[list[TimedOp]] = [[] for _ in range(group.size())]
        dist.all_gather_object(lanes, lane, group=group)
        if dist.get_rank() == 0:
            schedule = self._source.schedule(num_microbatches).without_communication()
            profile = self._source.profile
            costs = _in_mebibytes(profile.costs) if profile else None
            timeline = measured_timeline(schedule, lanes, costs, shapes_vary=self._source.shapes_vary)
            write_timeline(self._folder, f"iteration_{iteration:07d}", timeline, "MiB")


def _in_mebibytes(costs: StageCosts) -> StageCosts:
    names = [field.name for field in fields(costs) if field.name.startswith("memory")]
    return replace(costs, **{name: tuple(value / 2**20 for value in getattr(costs, name)) for name in names})


def clock_offset(group: dist.ProcessGroup) -> float:
    """Seconds by which this rank's clock is ahead of the clock of the group's first rank; a collective call.

    Ranks leave a barrier at nearly the same moment. The offset is the median over several barriers of the difference
    between the clocks at that moment. Its error is the time of a barrier, some tens of microseconds on one host.
    """
    differences = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier(group=group)
        now = time.perf_counter()
        clocks: list[float] = [0.0] * group.size()
        dist.all_gather_object(clocks, now, group=group)
        differences.append(now - clocks[0])
    return statistics.median(differences)
