"""The serial order of a schedule: one order of all ranks' computations, which lowering uses to place communication."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from operator import add

from megatron.zero_bubble.schedule.costs import SHARD_TIMES, StageCosts
from megatron.zero_bubble.schedule.ir import Op
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline


def unit_costs(num_stages: int) -> StageCosts:
    """Unit costs: F, B, W, E, EW, S and T take one time unit, BW two; messages and other operations take no time."""
    return StageCosts.uniform(num_stages, **dict.fromkeys(SHARD_TIMES, 1))


class Phases:
    """The phases of a rank: each VALIDATE ends a phase, and a rank without VALIDATE has one phase."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.starts = [0] + [position + 1 for position, op in enumerate(ops) if op.kind is OpKind.VALIDATE]

    def of(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1


class SerialOrder:
    """The computations of all ranks in an order that respects their dependencies.

    Computations are sorted by phase (see `Phases`), then by their end in the timeline, then by rank. Operations that
    take no time come after all other operations with the same end, in the order of their dependencies. A forward and a
    backward that run as a pair are one computation. `starts` and `ends` are the times of the timeline, shifted so that
    every phase starts after the previous phase has ended on all ranks.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._schedule = timeline.schedule
        self.phases = [Phases([timed.op for timed in lane]) for lane in timeline.computations]
        self.starts: list[list[float]] = []
        self.ends: list[list[float]] = []
        end = max((lane[-1].end for lane in timeline.computations if lane), default=0)
        for lane, here in zip(timeline.computations, self.phases, strict=True):
            starts, ends = [timed.start for timed in lane], [timed.end for timed in lane]
            if len(here.starts) > 1:
                shifts: list[float] = []
                for number, (begin, next_begin) in enumerate(pairwise((*here.starts, len(lane) + 1))):
                    # The last operation of a phase is VALIDATE, which comes after all other operations of the phase.
                    shifts += [3 * number * end] * (next_begin - 1 - begin) + [(3 * number + 2) * end]
                starts, ends = (list(map(add, times, shifts)) for times in (starts, ends))
            self.starts.append(starts)
            self.ends.append(ends)
        self.numbers = self._numbered(timeline)
        """Rank -> position of a computation on the rank -> index of the computation in the serial order."""
        begins = zip_longest(*(here.starts[1:] for here in self.phases))
        self.first_of_phase = [
            min(self.numbers[rank][begin - 1] for rank, begin in enumerate(ranks) if begin is not None)
            for ranks in begins
        ]
        """Phase, from the second on -> index, in the serial order, of the first VALIDATE that ends the previous
        phase."""

    def _numbered(self, timeline: Timeline) -> list[list[int]]:
        stops = [timed.end for lane in timeline.computations for timed in lane]
        firsts = [*accumulate(map(len, timeline.computations), initial=0)]
        """Rank -> index of the rank's first computation, if all computations are numbered rank by rank."""
        turns = {
            first + position: self._turn(rank, position)
            for rank, (first, lane) in enumerate(zip(firsts, timeline.computations, strict=False))
            for position, (_, start, stop) in enumerate(lane)
            if not stop > start
        }
        # Sorting is stable, so the last sort is by the most important key.
        order = [k for k in range(len(stops)) if k not in turns] + sorted(turns, key=turns.__getitem__)
        order.sort(key=stops.__getitem__)
        if OpKind.VALIDATE in timeline.schedule.kinds:
            phases = [
                2 * here.of(position) + (timed.op.kind is OpKind.VALIDATE)
                for lane, here in zip(timeline.computations, self.phases, strict=True)
                for position, timed in enumerate(lane)
            ]
            order.sort(key=phases.__getitem__)
        numbers = [0] * len(order)
        for number, computation in enumerate(order):
            numbers[computation] = number
        return [numbers[first:end] for first, end in pairwise(firsts)]

    def _turn(self, rank: int, position: int) -> tuple[float, bool]:
        """Sort key of operations that take no time and have the same end: their end in a simulation with unit costs.

        With unit costs, an operation that takes time ends later than the operations that make its inputs. Among
        operations with the same end in the simulation with unit costs, operations that take no time come last.
        """
        unit = self._in_unit_times[rank][position]
        return unit.end, unit.start == unit.end

    @cached_property
    def _in_unit_times(self) -> tuple[Sequence[TimedOp], ...]:
        return simulate(self._schedule, unit_costs(self._schedule.num_stages)).computations

    def num_before(self, rank: int, number: int) -> int:
        """The number of computations of `rank` among the first `number` computations of the serial order."""
        return bisect_left(self.numbers[rank], number)
