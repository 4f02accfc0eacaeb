"""Corrects the costs from which a schedule was planned, by comparison with measured steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from operator import add
from typing import NamedTuple

from megatron.zero_bubble.schedule import OpKind, Schedule, StageCosts, simulate
from megatron.zero_bubble.schedule.kinds import TIMES

TOLERANCE = 0.05
"""A difference of at most this fraction between the measured and the planned time of an operation is ignored."""
SPAN_TOLERANCE = 0.02
"""If a measured step time exceeds the simulated time by more than this fraction, message times are corrected."""
_MATTERS = 0.02
"""An error of a planned time is ignored if the error is below this fraction of a microbatch's mean time on a stage."""
_PARTS = 1024
"""Number of equally spaced values from which a bisection chooses the time that is added to every message."""


class Difference(NamedTuple):
    """A planned time that differs from the measured time; both times are in milliseconds."""

    subject: str
    planned: float
    measured: float

    def __str__(self) -> str:
        return f"{self.subject} {self.measured:.2f} ms, {self.planned:.2f} were planned"


def with_measured_times(planned: StageCosts, measured: StageCosts, schedule: Schedule) -> StageCosts:
    """Return a copy of `planned` with the measured times of operations; memory and message times do not change.

    A kind of operation that did not run keeps its planned time, except R: the planned time of an R that did not run is
    scaled by the same factor as the time of F. If a stage ran BW but no B, the times of B and W and the time that BW
    saves keep their planned proportions to each other.

    Args:
        planned: the costs from which the schedule was planned.
        measured: costs that were measured while the schedule ran.
        schedule: the schedule that ran.
    """
    measured = _in_planned_proportions(planned, measured, schedule)
    times = {
        name: tuple(new or old for new, old in zip(getattr(measured, name), getattr(planned, name), strict=True))
        for name in TIMES
    }
    stages = zip(measured.time_r, planned.time_r, measured.time_f, planned.time_f, strict=True)
    times["time_r"] = tuple(r or old_r * f / old_f for r, old_r, f, old_f in stages)
    corrected = replace(planned, saved_bw=(), **times, **planned.exchanges_within(times))
    saved = zip(measured.saved_bw, corrected.saving_as(planned).saved_bw, strict=True)
    return replace(corrected, saved_bw=tuple(new or old for new, old in saved))


def _in_planned_proportions(planned: StageCosts, measured: StageCosts, schedule: Schedule) -> StageCosts:
    """If a stage ran BW but no B, split the measured time of BW into B and W in the planned proportions."""
    lanes = enumerate(schedule.ops)
    ran = {(schedule.placement.stage_of(rank, op.chunk), op.kind) for rank, lane in lanes for op in lane}
    times = {name: list(getattr(measured, name)) for name in ("time_b", "time_w", "saved_bw")}
    for stage in range(planned.num_stages):
        if (stage, OpKind.BW) in ran and (stage, OpKind.B) not in ran:
            fused = times["time_b"][stage] + times["time_w"][stage]
            factor = fused / (planned.time_b[stage] + planned.time_w[stage] - planned.saved_bw[stage])
            for name, values in times.items():
                values[stage] = factor * getattr(planned, name)[stage]
    return replace(measured, **{name: tuple(values) for name, values in times.items()})


def with_measured_span(costs: StageCosts, schedule: Schedule, span: float) -> StageCosts:
    """Increase the times of messages and collectives in `costs` until the simulated time of `schedule` equals `span`.

    Messages of busy ranks are slower than messages of idle ranks. Variations in the duration of operations also make
    ranks wait for each other, as if messages were slower.

    Args:
        costs: costs with the measured times of operations.
        schedule: the schedule that ran.
        span: measured milliseconds from the start of the first operation to the end of the last operation on the
            slowest rank.
    """
    placement, missing = schedule.placement, span - simulate(schedule, costs).cost
    if missing <= 0 or placement.num_ranks == 1:
        return costs

    edges = range(placement.num_stages - 1)
    crosses = [placement.rank_of(edge) != placement.rank_of(edge + 1) for edge in edges]

    def slower(part: int) -> StageCosts:
        added = missing * part / _PARTS
        return replace(
            costs,
            time_comm=tuple(time + added * is_far for time, is_far in zip(costs.time_comm, crosses, strict=True)),
            latency_collective=tuple(time and time + added for time in costs.latency_collective),
        )

    return slower(bisect_left(range(_PARTS), span, key=lambda part: simulate(schedule, slower(part)).cost))


def differences(planned: StageCosts, corrected: StageCosts) -> Iterator[Difference]:
    """Yield the largest error of a planned time for each kind of operation, and the mean error of message times.

    `differences` ignores relative errors of at most `TOLERANCE`, and errors that are negligible relative to the
    computing time of a microbatch.
    """
    matters = _MATTERS * sum(map(planned.work, range(planned.num_stages)))
    for name, kind in TIMES.items():
        pairs = list(zip(getattr(planned, name), getattr(corrected, name), strict=True))
        stage, (before, after) = max(enumerate(pairs), key=lambda pair: abs(pair[1][1] - pair[1][0]))
        if abs(after - before) > max(TOLERANCE * before, matters / planned.num_stages):
            yield Difference(f"{kind.name} of stage {stage} takes", before, after)
    far = [pair for pair in zip(planned.time_comm, corrected.time_comm, strict=True) if any(pair)]
    if 2 * sum(after - before for before, after in far) > matters:  # every edge carries one message in each direction
        before, after = (sum(values) / len(far) for values in zip(*far, strict=True))
        yield Difference("ranks wait as if a message took", before, after)


def largest_change(old: StageCosts, new: StageCosts) -> float:
    """Return the largest relative change of any stage's computing time: F, B, W, R and operations on shards."""
    before, after = (map(add, map(costs.work, range(costs.num_stages)), costs.time_r) for costs in (old, new))
    return max(abs(now / then - 1.0) for then, now in zip(before, after, strict=True))
