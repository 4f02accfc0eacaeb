"""List scheduling for a V: each idle rank runs the ready operation with the highest priority."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron.zero_bubble.planner.event_loop import EventLoop
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.rules import GapRule


class ByPriority(EventLoop):
    """Ranks that run the F or B of highest priority, without recomputation.

    W fills gaps, and goes before an F that lacks the memory that W releases.

    Args:
        priorities: F0, F1, B1 and B0, each with its chunk, from the one that goes first on.
        leads: rank -> how many microbatches may be between the start of F0 and the end of B0.
    """

    weight = 2

    def __init__(self, problem: Problem, priorities: Sequence[str], leads: Sequence[int]) -> None:
        super().__init__(problem)
        assert not problem.recomputes, "R has no place among these rules"
        assert problem.placement.num_chunks == 2, "the kinds are those of two chunks"
        self.leads = leads
        self.by_priority = [
            [stages[int(kind[1])] + (problem.num_stages if kind[0] == "B" else 0) for kind in priorities]
            for stages in problem.stages_of
        ]
        """Rank -> F and B of both chunks."""

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
                if self.memory[rank] + self.needed_room(rank, code) > self.limits[rank]:
                    return weight, now
                return code, now
            ready = min(ready, arrival)
        if weight >= 0 and self.fills(rank, now, ready, self.duration[weight], GapRule.BALANCED):
            return weight, now
        return -1, ready

    def may_begin(self, rank: int, f: int) -> bool:
        """Whether the F `f` fits once every W is done, and microbatches in flight are few enough."""
        first = self.problem.stages_of[rank][0]
        if f == first and self.done[f] - self.done[self.num_stages + f] >= self.leads[rank]:
            return False
        return self.memory[rank] - self.releasable[rank] + self.needed_room(rank, f) <= self.limits[rank]

    def needed_room(self, rank: int, f: int) -> float:
        """Memory of the F `f`; in chunk 0 with room for chunk 1, if no microbatch is there that will release memory.

        The oldest microbatch can then always go on.
        """
        first, last = self.problem.stages_of[rank]
        is_empty = self.done[last] == self.done[self.num_stages + last]
        return self.allocation[f] + (self.allocation[last] if f == first and is_empty else 0)
