"""Extends a schedule to more microbatches by repeating a period of its steady state, so that planning stays fast."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import le
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline

LONG = 20_000
"""Largest number of F, B and W that are planned one by one; a longer schedule repeats part of a shorter schedule."""
WARMUPS = (4, 6, 10)
"""Numbers of microbatches per rank to try in the shorter schedule; with 4, most ranks reach the steady state."""
MOST_DISPLACED = 0.1
"""A period may be repeated if its fraction of displaced operations (see `_Period.displaced`) is at most this large."""
NUM_CUTS = 16
"""Number of parts into which a schedule is divided; the borders between the parts are tried as starts of a period."""
NUM_SIMULATED = 3
"""Number of periods that are simulated: the most regular periods that fit in memory."""
NUM_CHECKED = 24
"""Number of periods whose peak memory is compared with the memory limits: the most regular periods."""


def fewer_microbatches(placement: Placement, num_microbatches: int) -> Iterator[int]:
    """Yield smaller numbers of microbatches, from which a schedule can be extended to `num_microbatches`.

    Nothing is yielded if a schedule of `num_microbatches` microbatches has at most `LONG` F, B and W.
    """
    p, is_long = placement.num_ranks, 3 * placement.num_stages * num_microbatches > LONG
    for multiple in WARMUPS if is_long else ():
        fewer = multiple * p + num_microbatches % p
        if 2 * fewer <= num_microbatches:
            yield fewer


def extended(
    schedule: Schedule,
    num_microbatches: int,
    costs: StageCosts,
    limits: Sequence[float] | None = None,
    *,
    overlap_communication: bool = True,
) -> Schedule | None:
    """Extend a schedule to more microbatches by repeating a period of its steady state.

    Every rank runs its operations up to the start of the period, then repeats the period, then runs the remaining
    operations. Ranks cannot deadlock, because no operation before the start of the period needs a later operation. The
    period that takes the least time per microbatch is repeated.

    Args:
        limits: memory limit of each rank; by default the peak memory of the schedule.

    Returns:
        The extended schedule; None if every period exceeds the memory limits, or takes more time per microbatch than
        `schedule`.
    """
    more = num_microbatches - schedule.num_microbatches
    timeline = simulate(schedule, costs, overlap_communication=overlap_communication)
    limits = [limit * (1 + 1e-9) for limit in limits or timeline.peak_memory]
    best, shortest = None, timeline.cost / schedule.num_microbatches * (1 + 1e-9)
    busiest = max(work / schedule.num_microbatches for work in timeline.work)
    regular = (period for period in _periods(timeline, more) if period.displaced <= MOST_DISPLACED)
    periods = sorted(regular, key=lambda period: (period.displaced, period.length))
    once = ((period, _repeated(schedule, period, 1)) for period in periods[:NUM_CHECKED])
    fitting = ((period, few) for period, few in once if all(map(le, peak_memory(few, costs), limits)))
    for period, few in islice(fitting, NUM_SIMULATED):
        repeats = max(2, schedule.num_ranks // period.length)
        many = _repeated(schedule, period, 1 + repeats)
        times = [simulate(each, costs, overlap_communication=overlap_communication).cost for each in (few, many)]
        time = (times[1] - times[0]) / (repeats * period.length)
        if time < shortest:
            best, shortest = period, time
        if time <= busiest * (1 + 1e-9):
            break
    return None if best is None else _repeated(schedule, best, more // best.length)


class _Period(NamedTuple):
    """A period of a schedule: every rank runs each kind of operation for the same number of successive microbatches."""

    length: int
    """Number of microbatches in the period."""
    parts: tuple[_Part, ...]
    """Rank -> its part of the period."""

    @property
    def displaced(self) -> float:
        """Number of operations that run during the period but do not belong to it, per operation of the period."""
        return sum(part.end - part.start - part.size for part in self.parts) / sum(part.size for part in self.parts)


class _Part(NamedTuple):
    """The operations of one rank in a period."""

    start: int
    """Position of the first operation of the period."""
    end: int
    """Position after the last operation of the period."""
    size: int
    """Number of operations of the period between `start` and `end`."""
    next_microbatch: dict[tuple[OpKind, int], int]
    """(kind, chunk) -> first microbatch after the period."""


def _repeated(schedule: Schedule, period: _Period, count: int) -> Schedule:
    """Return the schedule with `count` more repetitions of the period."""
    length, num_microbatches = period.length, schedule.num_microbatches + count * period.length
    every = {
        (kind, chunk): [Op(kind, microbatch, chunk) for microbatch in range(num_microbatches)]
        for kind in schedule.kinds
        for chunk in range(schedule.num_chunks)
    }
    """(kind, chunk) -> operations of all microbatches; the schedules of all ranks share these objects."""

    def later(ops: Sequence[Op], shift: int) -> list[Op]:
        """Return the operations with `shift` added to their microbatch numbers."""
        return [every[kind, chunk][microbatch + shift] for kind, microbatch, chunk in ops]

    ranks = []
    for ops, part in zip(schedule.ops, period.parts, strict=True):
        inside: list[Op] = []
        displaced: list[Op] = []
        for op in ops[part.start : part.end]:
            (inside if op.microbatch < part.next_microbatch[op.kind, op.chunk] else displaced).append(op)
        lane = [*later(ops[: part.start], 0), *inside]
        for number in range(1, count + 1):
            lane += later(inside, number * length)
        lane += later(displaced, count * length)
        lane += later(ops[part.end :], count * length)
        ranks.append(tuple(lane))
    return replace(schedule, num_microbatches=num_microbatches, ops=tuple(ranks))


def _periods(timeline: Timeline, more: int) -> Iterator[_Period]:
    """Yield periods whose lengths divide `more`, the number of microbatches to add."""
    schedule = timeline.schedule
    m, p = schedule.num_microbatches, schedule.num_ranks
    first_lane = timeline.lanes[schedule.placement.rank_of(0)]
    starts = [timed.start for timed in first_lane if timed.op.kind is OpKind.F and timed.op.chunk == 0]
    ranks = [_Rank(lane) for lane in timeline.lanes]
    for length in (each for each in range(1, min(2 * p, m // 2) + 1) if more % each == 0):
        for microbatch in sorted({number * (m - length) // NUM_CUTS for number in range(1, NUM_CUTS)}):
            parts = []
            for rank in ranks:
                part = rank.part(starts[microbatch], length)
                if part is None:
                    break
                parts.append(part)
            else:
                yield _Period(length, tuple(parts))


class _Rank:
    """The operations of one rank, from which periods are cut."""

    def __init__(self, lane: Sequence[TimedOp]) -> None:
        self.starts = [timed.start for timed in lane]
        self.rows: dict[tuple[OpKind, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        """(kind, chunk) -> (positions, microbatches) of the operations of the kind and chunk."""
        for position, ((kind, microbatch, chunk), _, _) in enumerate(lane):
            positions, microbatches = self.rows[kind, chunk]
            positions.append(position)
            microbatches.append(microbatch)

    def part(self, time: float, length: int) -> _Part | None:
        """Cut out the rank's part of a period that starts at `time`.

        Return None if some kind of operation other than R (recomputation) runs for fewer than `length` microbatches
        after `time`. A period may have fewer R than F, because not every microbatch has an R. All R of a period belong
        to `length` successive microbatches.
        """
        start = end = bisect_left(self.starts, time)
        size, next_microbatch = 0, {}
        for (kind, chunk), (positions, microbatches) in self.rows.items():
            first = bisect_left(positions, start)
            if first < len(positions):
                microbatch = microbatches[first]
            elif kind is OpKind.R:
                continue
            else:
                return None
            if kind is OpKind.R:
                f_positions, f_microbatches = self.rows[OpKind.F, chunk]
                next_forward = bisect_left(f_positions, start)
                microbatch = min([microbatch, *f_microbatches[next_forward : next_forward + 1]])
            last = max(first, bisect_left(microbatches, microbatch + length))
            if kind is not OpKind.R and last - first < length:
                return None
            size += last - first
            next_microbatch[kind, chunk] = microbatch + length
            if last > first:
                end = max(end, positions[last - 1] + 1)
        return _Part(start, end, size, next_microbatch)
