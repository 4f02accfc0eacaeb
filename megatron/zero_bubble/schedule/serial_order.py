"""An order in which the computations of all ranks could run one at a time: lowering places communication by it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from megatron.zero_bubble.schedule.costs import VOCABULARY_COSTS, StageCosts
from megatron.zero_bubble.schedule.ir import Op
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline


def unit_costs(num_stages: int) -> StageCosts:
    """Costs by which every operation takes 1 and a message 0; only L, STEP and VALIDATE take no time."""
    times = (name for name in VOCABULARY_COSTS if name.startswith("time"))
    return replace(StageCosts.uniform(num_stages), **dict.fromkeys(times, (1,) * num_stages))


class Phases:
    """The parts into which VALIDATE divides the operations of a rank; without VALIDATE there is one."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.begins = [0] + [position + 1 for position, op in enumerate(ops) if op.kind is OpKind.VALIDATE]

    def of(self, position: int) -> int:
        return bisect_right(self.begins, position) - 1


class SerialOrder:
    """The computations of all ranks in an order that respects their dependencies.

    They are ordered by phase, then by their end in a timeline, then by rank; what takes no time comes after all else
    that ends at the same moment, in an order in which it could run. `starts` and `ends` are the timeline's
    times, shifted so that every phase begins after the previous one has ended on all ranks.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._schedule = timeline.schedule
        ops = timeline.schedule.ops
        self.phases = [Phases(rank_ops) for rank_ops in ops]
        self.starts: list[list[float]] = []
        self.ends: list[list[float]] = []
        end = max((lane[-1].end for lane in timeline.lanes if lane), default=0)
        for lane, here in zip(timeline.lanes, self.phases, strict=True):
            shifts: list[float] = []
            for number, (begin, next_begin) in enumerate(pairwise((*here.begins, len(lane) + 1))):
                # The last operation of a phase is VALIDATE, which comes after those of all ranks.
                shifts += [3 * number * end] * (next_begin - 1 - begin) + [(3 * number + 2) * end]
            self.starts.append([timed.start + shift for timed, shift in zip(lane, shifts, strict=False)])
            self.ends.append([timed.end + shift for timed, shift in zip(lane, shifts, strict=False)])
        self.numbers: list[list[int]] = [[0] * len(rank_ops) for rank_ops in ops]
        """For every rank, the place of each of its computations in the order."""
        self.first_of_phase: list[int] = []
        """For every phase but the first, the place of the first VALIDATE that begins it."""
        keyed = []
        for rank, lane in enumerate(timeline.lanes):
            for position, (op, start, stop) in enumerate(lane):
                phase = 2 * self.phases[rank].of(position) + (op.kind is OpKind.VALIDATE)
                turn = (0.0, False) if stop > start else self._turn(rank, position)
                keyed.append((phase, stop, turn, rank, position))
        for number, (phase, *_, rank, position) in enumerate(sorted(keyed)):
            self.numbers[rank][position] = number
            if phase > 2 * len(self.first_of_phase):
                self.first_of_phase.append(number)

    def _turn(self, rank: int, position: int) -> tuple[float, bool]:
        """What decides between operations that take no time and end at the same moment.

        One that waits for another comes later in unit times.
        """
        unit = self._in_unit_times[rank][position]
        return unit.end, unit.start == unit.end

    @cached_property
    def _in_unit_times(self) -> tuple[tuple[TimedOp, ...], ...]:
        return simulate(self._schedule, unit_costs(self._schedule.num_stages)).lanes

    def num_before(self, rank: int, number: int) -> int:
        """How many computations of `rank` come before place `number`."""
        return bisect_left(self.numbers[rank], number)
