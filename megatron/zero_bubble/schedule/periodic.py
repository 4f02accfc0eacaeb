"""Extends a schedule to more microbatches by repeating a part of it, so that a long iteration is planned once."""

from __future__ import annotations

from bisect import bisect_left
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
"""So many F, B and W are planned one by one; a longer schedule repeats the steady state of a shorter one."""
WARMUPS = (4, 6, 10)
"""Microbatches of the shorter schedule, as a multiple of the ranks: with the first number most ranks have filled their
memory, and have come into their rhythm, long before their last microbatch."""
MOST_DISPLACED = 0.1
"""The largest part of the operations of a period by which its ranks may be out of step with each other."""
NUM_CUTS = 16
"""At so many times, for each length, a period may begin."""
NUM_SIMULATED = 3
"""So many of the most regular periods that fit into memory are simulated."""
NUM_CHECKED = 24
"""Of so many it is checked whether they fit."""


def is_long(placement: Placement, num_microbatches: int) -> bool:
    """Whether a schedule is planned from a shorter one."""
    return 3 * placement.num_stages * num_microbatches > LONG


def fewer_microbatches(placement: Placement, num_microbatches: int) -> Iterator[int]:
    """Yield how many microbatches to plan in place of so many, a multiple of the ranks less."""
    if not is_long(placement, num_microbatches):
        return
    p = placement.num_ranks
    for multiple in WARMUPS:
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
    """The schedule for more microbatches: its warmup and cooldown, and a part of its steady state repeated.

    Every rank runs what it does until a moment, then a period of some microbatches again and again, then what is left.
    What comes before that moment on all ranks needs nothing that comes after it, so that no rank waits for ever. The
    period is the one that takes least time. None if each takes more time for a microbatch than the schedule itself, or
    more memory than `limits`, one a rank: that of the schedule by default.
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
    """A part of a schedule to repeat: of each kind of operation of a rank, as many successive microbatches."""

    length: int
    """Its microbatches."""
    parts: tuple[_Part, ...]

    @property
    def displaced(self) -> float:
        """How many operations stand between those of the period without being part of it, for each that is."""
        return sum(len(part.displaced) for part in self.parts) / sum(len(part.period) for part in self.parts)


class _Part(NamedTuple):
    """What one rank runs in a period."""

    begin: int
    """The position of the first operation of the period."""
    end: int
    """The position behind the last one."""
    period: Sequence[Op]
    displaced: Sequence[Op]
    """Operations that come after the period, but stand before its end."""


def _repeated(schedule: Schedule, period: _Period, count: int) -> Schedule:
    """The schedule with the period `count` times more."""
    length = period.length
    ranks = []
    for ops, part in zip(schedule.ops, period.parts, strict=True):
        lane = [*ops[: part.begin], *part.period]
        for number in range(1, count + 1):
            lane += _later(part.period, number * length)
        lane += _later(part.displaced, count * length)
        lane += _later(ops[part.end :], count * length)
        ranks.append(tuple(lane))
    return replace(schedule, num_microbatches=schedule.num_microbatches + count * length, ops=tuple(ranks))


def _later(ops: Sequence[Op], shift: int) -> list[Op]:
    """The same operations of microbatches that come `shift` later."""
    return [Op(kind, microbatch + shift, chunk) for kind, microbatch, chunk in ops]


def _periods(timeline: Timeline, more: int) -> Iterator[_Period]:
    """Yield periods of lengths that divide `more`."""
    schedule = timeline.schedule
    m, p = schedule.num_microbatches, schedule.num_ranks
    first_lane = timeline.lanes[schedule.placement.rank_of(0)]
    begins = [timed.start for timed in first_lane if timed.op.kind is OpKind.F and timed.op.chunk == 0]
    ranks = [_Rank(lane) for lane in timeline.lanes]
    for length in (each for each in range(1, min(2 * p, m // 2) + 1) if more % each == 0):
        for microbatch in sorted({number * (m - length) // NUM_CUTS for number in range(1, NUM_CUTS)}):
            begin = begins[microbatch]
            parts = [part for rank in ranks if (part := rank.part(begin, length)) is not None]
            if len(parts) == len(ranks):
                yield _Period(length, tuple(parts))


class _Rank:
    """The operations of one rank, to be cut at a time."""

    def __init__(self, lane: Sequence[TimedOp]) -> None:
        self.ops = [timed.op for timed in lane]
        self.starts = [timed.start for timed in lane]
        self.num_kinds = len({(op.kind, op.chunk) for op in self.ops if op.kind is not OpKind.R})
        """How many operations it runs for every microbatch."""
        self.restored = [(op.microbatch, op.chunk, place) for place, op in enumerate(self.ops) if op.kind is OpKind.R]
        """Microbatch, chunk and position of every R."""

    def part(self, time: float, length: int) -> _Part | None:
        """The operations around a period that begins at `time`; None if too few are left for it.

        Not every microbatch has an R. Those in the period are of as many microbatches as there are of another kind.
        """
        begin = end = bisect_left(self.starts, time)
        first: dict[tuple[OpKind, int], int] = {}
        """Kind and chunk -> the first microbatch of the period."""
        missing = length * self.num_kinds
        later = [(microbatch, chunk) for microbatch, chunk, place in self.restored if place >= begin]
        for chunk in {chunk for _, chunk in later}:
            forwards = (op.microbatch for op in self.ops[begin:] if op.kind is OpKind.F and op.chunk == chunk)
            begins = min(next(forwards, 0), next(microbatch for microbatch, other in later if other == chunk))
            first[OpKind.R, chunk] = begins
            missing += sum(other == chunk and microbatch < begins + length for microbatch, other in later)
        period: list[Op] = []
        displaced: list[Op] = []
        while missing:
            if end == len(self.ops):
                return None
            op = self.ops[end]
            end += 1
            if op.microbatch < first.setdefault((op.kind, op.chunk), op.microbatch) + length:
                period.append(op)
                missing -= 1
            else:
                displaced.append(op)
        return _Part(begin, end, period, displaced)
