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
"""The most F, B and W that are planned one by one; a longer schedule repeats the steady state of a shorter one."""
WARMUPS = (4, 6, 10)
"""Microbatches of the shorter schedule, as a multiple of the ranks: with the first number most ranks have filled their
memory, and have come into their rhythm, long before their last microbatch."""
MOST_DISPLACED = 0.1
"""The largest part of the operations of a period by which its ranks may be out of step with each other."""
NUM_CUTS = 16
"""How many times, spread over the schedule, are tried as the beginning of a period of each length."""
NUM_SIMULATED = 3
"""Number of periods that are simulated: the most regular ones that fit into memory."""
NUM_CHECKED = 24
"""How many of the most regular periods are compared with the memory limit."""


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

    Every rank runs its operations up to some moment, then repeats a period of some microbatches, then runs the rest.
    Operations before that moment need no operation after it on any rank, so that no rank waits for ever. The
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
        return sum(part.end - part.begin - part.size for part in self.parts) / sum(part.size for part in self.parts)


class _Part(NamedTuple):
    """The operations of one rank in a period."""

    begin: int
    """The position of the first operation of the period."""
    end: int
    """The position after the last operation of the period."""
    size: int
    """How many operations of the period stand there. The others come after it."""
    behind: dict[tuple[OpKind, int], int]
    """Kind and chunk -> the first microbatch after the period."""


def _repeated(schedule: Schedule, period: _Period, count: int) -> Schedule:
    """The schedule with `count` more repetitions of the period."""
    length, num_microbatches = period.length, schedule.num_microbatches + count * period.length
    every = {
        (kind, chunk): [Op(kind, microbatch, chunk) for microbatch in range(num_microbatches)]
        for kind in schedule.kinds
        for chunk in range(schedule.num_chunks)
    }
    """Kind and chunk -> their operations, which all ranks share."""

    def later(ops: Sequence[Op], shift: int) -> list[Op]:
        """The same operations for the microbatches `shift` places later."""
        return [every[kind, chunk][microbatch + shift] for kind, microbatch, chunk in ops]

    ranks = []
    for ops, part in zip(schedule.ops, period.parts, strict=True):
        inside: list[Op] = []
        displaced: list[Op] = []
        for op in ops[part.begin : part.end]:
            (inside if op.microbatch < part.behind[op.kind, op.chunk] else displaced).append(op)
        lane = [*later(ops[: part.begin], 0), *inside]
        for number in range(1, count + 1):
            lane += later(inside, number * length)
        lane += later(displaced, count * length)
        lane += later(ops[part.end :], count * length)
        ranks.append(tuple(lane))
    return replace(schedule, num_microbatches=num_microbatches, ops=tuple(ranks))


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
            parts = []
            for rank in ranks:
                part = rank.part(begin, length)
                if part is None:
                    break
                parts.append(part)
            else:
                yield _Period(length, tuple(parts))


class _Rank:
    """The operations of one rank, to be cut at a time."""

    def __init__(self, lane: Sequence[TimedOp]) -> None:
        self.starts = [timed.start for timed in lane]
        self.rows: dict[tuple[OpKind, int], _Row] = {}
        """Kind and chunk -> its operations."""
        for position, ((kind, microbatch, chunk), _, _) in enumerate(lane):
            row = self.rows.setdefault((kind, chunk), _Row([], []))
            row.positions.append(position)
            row.microbatches.append(microbatch)

    def part(self, time: float, length: int) -> _Part | None:
        """The operations around a period that begins at `time`; None if too few are left for it.

        Not every microbatch has an R, so a period may have fewer R than F. They belong to the microbatches of one
        period.
        """
        begin = end = bisect_left(self.starts, time)
        size, behind = 0, {}
        for (kind, chunk), row in self.rows.items():
            first = bisect_left(row.positions, begin)
            if first < len(row.positions):
                microbatch = row.microbatches[first]
            elif kind is OpKind.R:
                continue
            else:
                return None
            if kind is OpKind.R:
                forwards = self.rows[OpKind.F, chunk]
                next_forward = bisect_left(forwards.positions, begin)
                microbatch = min([microbatch, *forwards.microbatches[next_forward : next_forward + 1]])
            last = max(first, bisect_left(row.microbatches, microbatch + length))
            if kind is not OpKind.R and last - first < length:
                return None
            size += last - first
            behind[kind, chunk] = microbatch + length
            if last > first:
                end = max(end, row.positions[last - 1] + 1)
        return _Part(begin, end, size, behind)


class _Row(NamedTuple):
    """The operations of one kind and chunk of a rank, in microbatch order."""

    positions: list[int]
    microbatches: list[int]
