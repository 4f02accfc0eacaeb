"""Simulates the reduction of every rank's gradients over its replicas, which overlaps with computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zero_bubble.schedule import OpKind, ScheduleError, TimedOp, Timeline
from megatron.zero_bubble.schedule.kinds import KINDS
from megatron.zero_bubble.schedule.tail import run_together


@dataclass(frozen=True)
class Reduction:
    """End times of the reduction of gradients, in the unit and with the origin of the timeline's times."""

    ends: tuple[float, ...]
    makespan: float
    """Time until the last gradient of all ranks is reduced."""
    exposed: float
    """Time by which the reduction makes the makespan longer."""


def simulate_reduction(
    timeline: Timeline, time_reduce: Sequence[float], num_buckets: int, *, by_parameter: bool
) -> Reduction:
    """Simulate the reduction of gradients during `timeline`, bucket by bucket, on a separate link for each rank.

    The parameters of a chunk fill `num_buckets` buckets of equal size. The gradients of the buckets become ready at
    equal intervals during the last W of the chunk: the W of the last microbatch or, if the last W of a rank are ordered
    by parameter, all of these W. A link reduces one bucket after the other, in the order in which buckets become ready,
    and does not slow down computation. The gradient of a vocabulary shard is not part of this reduction.

    Args:
        time_reduce: stage -> time to reduce all gradients of the stage.
        by_parameter: whether the last W of each rank run parameter by parameter (see `run_together`).

    Raises:
        ScheduleError: `time_reduce` does not have one time for each stage, or `num_buckets` is below 1.
    """
    schedule = timeline.schedule
    if len(time_reduce) != schedule.num_stages or num_buckets < 1:
        raise ScheduleError(
            f"a reduction needs {schedule.num_stages} times and at least one bucket, "
            f"got {len(time_reduce)} and {num_buckets}"
        )
    ends = []
    for rank, lane in enumerate(timeline.lanes):
        ready = []
        for first, last in _last_gradients(lane, schedule.num_chunks, by_parameter):
            each = time_reduce[schedule.placement.stage_of(rank, last.op.chunk)] / num_buckets
            step = (last.end - first.start) / num_buckets
            ready += [(first.start + (k + 1) * step, each) for k in range(num_buckets)]
        end: float = 0
        for time, each in sorted(ready):
            end = max(end, time) + each
        ends.append(max(end, lane[-1].end))
    begin = min(lane[0].start for lane in timeline.lanes)
    makespan = max(ends) - begin
    return Reduction(tuple(ends), makespan, makespan - timeline.makespan)


def _last_gradients(lane: Sequence[TimedOp], num_chunks: int, by_parameter: bool) -> list[tuple[TimedOp, TimedOp]]:
    """Chunk -> (first, last) of the operations that together complete the gradients of the chunk."""
    timed = {timed.op: timed for timed in lane}
    last: dict[int, tuple[TimedOp, TimedOp]] = {}
    ops = [timed.op for timed in lane]
    for group in run_together(ops) if by_parameter else [(op,) for op in ops]:
        if OpKind.W in KINDS[group[0].kind].makes:
            last[group[0].chunk] = timed[group[0]], timed[group[-1]]
    return [last[chunk] for chunk in range(num_chunks)]
