"""Plans several chunks a rank, through which microbatches pass in groups as in Megatron's interleaved schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.event_loop import EventLoop
from megatron.zero_bubble.planner.problem import Problem, tolerance
from megatron.zero_bubble.planner.rules import GapRule


def even_groups(num_microbatches: int, size: int) -> tuple[int, ...]:
    """The sizes of as many groups as there are with at least `size` microbatches each, as even as they can be."""
    count = max(1, num_microbatches // size)
    return tuple(num_microbatches // count + (number < num_microbatches % count) for number in range(count))


def grouped_order(problem: Problem, rank: int, groups: Sequence[int]) -> tuple[Order, Order]:
    """All F of `rank`, and all its B: a group of microbatches passes through chunk after chunk before the next one."""
    stages = problem.stages_of[rank]
    forwards = [stage for group in groups for stage in stages for _ in range(group)]
    backwards = [problem.num_stages + stage for group in groups for stage in reversed(stages) for _ in range(group)]
    return forwards, backwards


def alternating_orders(problem: Problem, groups: Sequence[int], slope: float) -> list[Order]:
    """Every rank runs its first F, then F and B in turn, then the B that are left.

    The last rank begins with the F before the first one of its last chunk, as late as it can; each rank before it with
    `slope` F more, which is 2 in Megatron, as far as its memory has room for them.
    """
    orders = []
    most = problem.num_microbatches * problem.placement.num_chunks
    for rank in range(problem.num_ranks):
        forwards, backwards = grouped_order(problem, rank, groups)
        # A rank never waits for more F than the rank before it runs before its first B.
        most = min(most, _most_forwards(problem, rank, forwards))
        before_last_chunk = (problem.placement.num_chunks - 1) * max(groups) + problem.num_delayed
        warmup = before_last_chunk + round(slope * (problem.num_ranks - 1 - rank))
        warmup = min(warmup, most - 1)
        order = forwards[:warmup]
        for number, backward in enumerate(backwards):
            order += [*forwards[warmup + number : warmup + number + 1], backward]
        orders.append(order)
    return orders


def _most_forwards(problem: Problem, rank: int, forwards: Order) -> int:
    """How many F, the first in order, fit in the memory of a rank at once, if all drop their activations that can."""
    footprints = [problem.footprints[stage] for stage in forwards]
    room = problem.limits[rank] - problem.recomputes * max(footprint.restored for footprint in footprints)
    held = accumulate(each.dropped if problem.recomputes else each.whole for each in footprints)
    return max(1, sum(amount <= room + tolerance(room) for amount in held))


class InGroups(EventLoop):
    """Ranks that run a B where there is one, then an F, and W in gaps, without recomputation.

    Args:
        groups: sizes of the groups in which microbatches pass through the chunks; F keeps their order on every rank.
        weight_rule: whether W fills a gap that is too short for it.
        forward_rule: whether F fills a gap that is too short for it.
    """

    weight = 3

    def __init__(
        self,
        problem: Problem,
        groups: Sequence[int],
        weight_rule: GapRule = GapRule.BALANCED,
        forward_rule: GapRule = GapRule.ALWAYS,
    ) -> None:
        super().__init__(problem)
        assert not problem.recomputes, "R has no place among these rules"
        self.weight_rule, self.forward_rule = weight_rule, forward_rule
        self.forwards: list[deque[int]] = []
        self.backwards: list[deque[int]] = []
        """Rank -> the B that it has not run, in the order of the groups."""
        for rank in range(problem.num_ranks):
            forwards, backwards = map(deque, grouped_order(problem, rank, groups))
            self.forwards.append(forwards)
            self.backwards.append(backwards)

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        forwards, backwards, weights = self.forwards[rank], self.backwards[rank], self.weights[rank]
        b, b_ready = self.next_backward(rank, now)
        if b_ready <= now:
            backwards.remove(b)
            return b, now
        f_ready = inf
        if forwards:
            f_ready = self.next_arrival(forwards[0], now)
            if f_ready < inf and not self.has_room(rank, forwards[0]):
                if weights:
                    return weights[0], now
                f_ready = inf
        ready = min(b_ready, f_ready)
        if f_ready <= now:
            if self.fills(rank, now, b_ready, self.duration[forwards[0]], self.forward_rule):
                return forwards.popleft(), now
            ready = b_ready
        if weights and self.fills(rank, now, ready, self.duration[weights[0]], self.weight_rule):
            return weights[0], now
        return -1, ready

    def next_backward(self, rank: int, now: float) -> tuple[int, float]:
        """The B to run next and when its gradient is there: of those that are there now the first in order."""
        backwards = self.backwards[rank]
        there, soonest = [], inf
        for stage in self.problem.stages_of[rank]:
            arrival = self.next_arrival(self.num_stages + stage, now)
            soonest = min(soonest, arrival)
            if arrival <= now:
                there.append(self.num_stages + stage)
        if len(there) > 1:
            return min(there, key=backwards.index), soonest
        return (there[0] if there else -1), soonest

    def has_room(self, rank: int, f: int) -> bool:
        """Whether the F `f` fits, and leaves room for all that the oldest microbatch still needs.

        The oldest is the first that has not passed all chunks of the rank. Room for it is kept, so that no younger
        microbatch takes the memory that its forwards need. Older microbatches only release memory.
        """
        if self.memory[rank] + self.allocation[f] > self.limits[rank]:
            return False
        stages = self.problem.stages_of[rank]
        begun = [self.done[stage] + (stage == f) for stage in stages]
        oldest = begun[-1]
        missing = oldest < self.num_microbatches
        kept = sum(
            self.allocation[stage] * (number - oldest + (missing and number == oldest))
            for stage, number in zip(stages, begun, strict=True)
        )
        return kept <= self.limits[rank]
