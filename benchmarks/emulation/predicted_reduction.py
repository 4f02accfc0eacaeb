"""Simulates when the gradients of every rank are reduced over its replicas, while the rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.zero_bubble.schedule import OpKind, ScheduleError, TimedOp, Timeline
from megatron.zero_bubble.schedule.kinds import KINDS
from megatron.zero_bubble.schedule.tail import run_together


@dataclass(frozen=True)
class Reduction:
    """When the gradients of every rank are reduced, in the unit and from the start of the timeline's times."""

    ends: tuple[float, ...]
    makespan: float
    """Time until the last gradient anywhere is reduced."""
    exposed: float
    """Time by which the reduction makes the makespan longer."""


def simulate_reduction(
    timeline: Timeline, time_reduce: Sequence[float], num_buckets: int, *, by_parameter: bool
) -> Reduction:
    """Reduce the gradients while `timeline` runs, bucket by bucket, on a link of each rank's own.

    A chunk's parameters fill `num_buckets` buckets of equal size, whose gradients are ready in equal steps of the
    chunk's last gradients: those of the last microbatch, or of the whole tail if it runs parameter by parameter. A link
    carries one bucket after the other, in the order in which they are ready, and takes no time from compute. The
    gradient of a vocabulary shard is not reduced with them.

    Args:
        time_reduce: for each stage, the time to reduce all its gradients.
        by_parameter: whether neighbours in the tail run together, see `run_together`.

    Raises:
        ScheduleError: the times are not one a stage, or there is no bucket.
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
    """For each chunk, the first and the last of the operations that together complete its gradients."""
    timed = {timed.op: timed for timed in lane}
    last: dict[int, tuple[TimedOp, TimedOp]] = {}
    ops = [timed.op for timed in lane]
    for group in run_together(ops) if by_parameter else [(op,) for op in ops]:
        if OpKind.W in KINDS[group[0].kind].makes:
            last[group[0].chunk] = timed[group[0]], timed[group[-1]]
    return [last[chunk] for chunk in range(num_chunks)]
