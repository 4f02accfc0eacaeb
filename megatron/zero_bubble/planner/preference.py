"""List scheduling for a V-shaped placement: each idle rank runs the ready operation with the highest priority."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron.zero_bubble.planner.event_loop import EventLoop
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.rules import GapRule


class ByPriority(EventLoop):
    """A scheduling policy without recomputation that runs the ready F or B with the highest priority.

    A W runs in idle gaps, and before an F for which the W has to release memory.

    Args:
        problem: a problem with a V-shaped placement and without recomputation.
        priorities: the names F0, F1, B1 and B0 (F and B of chunks 0 and 1), the highest priority first.
        in_flight_limits: rank -> largest number of microbatches in flight at once. A microbatch is in flight from its F
            of chunk 0 to its B of chunk 0.
    """

    weight = 2

    def __init__(self, problem: Problem, priorities: Sequence[str], in_flight_limits: Sequence[int]) -> None:
        super().__init__(problem)
        assert not problem.recomputes, "the policy does not plan recomputation"
        assert problem.placement.num_chunks == 2, "the priorities are for two chunks"
        self.in_flight_limits = in_flight_limits
        self.by_priority = [
            [stages[int(kind[1])] + (problem.num_stages if kind[0] == "B" else 0) for kind in priorities]
            for stages in problem.stages_of
        ]
        """Rank -> codes of F and B of both chunks, the highest priority first."""

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        weight = max(self.weights[rank], default=-1)
        ready = inf
        for code in self.by_priority[rank]:
            is_forward = code < self.num_stages
            arrival = self.next_arrival(code, now)
            if arrival == inf or (is_forward and not self.may_begin(rank, code)):
                continue
            if arrival <= now:
                if not is_forward:
                    return code, now
                if self.memory[rank] + self.needed_memory(rank, code) > self.limits[rank]:
                    return weight, now
                return code, now
            ready = min(ready, arrival)
        if weight >= 0 and self.fills(rank, now, ready, self.duration[weight], GapRule.BALANCED):
            return weight, now
        return -1, ready

    def may_begin(self, rank: int, f: int) -> bool:
        """Whether the limit on microbatches in flight allows F `f`, and `f` fits in memory once ready W have run."""
        first = self.problem.stages_of[rank][0]
        if f == first and self.done[f] - self.done[self.num_stages + f] >= self.in_flight_limits[rank]:
            return False
        return self.memory[rank] - self.releasable[rank] + self.needed_memory(rank, f) <= self.limits[rank]

    def needed_memory(self, rank: int, f: int) -> float:
        """Memory that has to be free before the F `f` runs.

        While no microbatch is in flight in chunk 1, an F of chunk 0 has to leave memory for an F of chunk 1, so that
        the oldest microbatch can always run its F of chunk 1.
        """
        first, last = self.problem.stages_of[rank]
        is_empty = self.done[last] == self.done[self.num_stages + last]
        return self.allocation[f] + (self.allocation[last] if f == first and is_empty else 0)
