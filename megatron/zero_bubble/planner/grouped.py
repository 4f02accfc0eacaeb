"""Plans orders for ranks with several chunks: microbatches pass through chunks in groups, as in interleaved 1F1B."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.event_loop import EventLoop
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import tolerance
from megatron.zero_bubble.planner.rules import GapRule
from megatron.zero_bubble.schedule.generators.one_f_one_b import alternate


def even_groups(num_microbatches: int, size: int) -> tuple[int, ...]:
    """Divide microbatches into groups of nearly equal size; return the sizes of the groups.

    Every group has at least `size` microbatches, unless there are fewer than `size` microbatches in total. The number
    of groups is as large as possible.
    """
    count = max(1, num_microbatches // size)
    return tuple(num_microbatches // count + (number < num_microbatches % count) for number in range(count))


def grouped_order(problem: Problem, rank: int, groups: Sequence[int]) -> tuple[Order, Order]:
    """All F and all B of `rank`; each group of microbatches passes through all chunks before the next group starts."""
    stages = problem.stages_of[rank]
    forwards = [stage for group in groups for stage in stages for _ in range(group)]
    backwards = [problem.num_stages + stage for group in groups for stage in reversed(stages) for _ in range(group)]
    return forwards, backwards


def warmup_length(problem: Problem, rank: int, groups: Sequence[int], slope: float) -> int:
    """Number of F in the warmup of `rank`, before F and B alternate, if all of these F fit in memory."""
    before_last_chunk = (problem.placement.num_chunks - 1) * max(groups) + problem.num_delayed
    return before_last_chunk + round(slope * (problem.num_ranks - 1 - rank))


def alternating_orders(problem: Problem, groups: Sequence[int], slope: float) -> list[Order]:
    """Orders of 1F1B for groups of microbatches: a rank runs a warmup of F, then F and B in turn, then a cooldown of B.

    Without vocabulary shards, the warmup of the last rank ends before the first F of its last chunk. Each rank but the
    last has `slope` more F in its warmup than the next rank; the difference is smaller if memory is short.

    Args:
        slope: difference between the warmups of successive ranks, in numbers of F; 2 in Megatron's interleaved
            schedule.

    Returns:
        Rank -> its F and B in order.
    """
    orders = []
    most = problem.num_microbatches * problem.placement.num_chunks
    for rank in range(problem.num_ranks):
        forwards, backwards = grouped_order(problem, rank, groups)
        # A rank cannot run more F in its warmup than the previous rank.
        most = min(most, _most_forwards(problem, rank, forwards))
        warmup = min(warmup_length(problem, rank, groups, slope), most - 1)
        orders.append(list(alternate(forwards, backwards, warmup)))
    return orders


def _most_forwards(problem: Problem, rank: int, forwards: Order) -> int:
    """Number of F in `forwards` whose activations fit in a rank's memory at once.

    In a problem with recomputation, every F drops its activations, and memory for one R stays free.
    """
    footprints = [problem.footprints[stage] for stage in forwards]
    room = problem.limits[rank] - problem.recomputes * max(footprint.restored for footprint in footprints)
    memory = accumulate(each.dropped if problem.recomputes else each.whole for each in footprints)
    return max(1, sum(amount <= room + tolerance(room) for amount in memory))


class InGroups(EventLoop):
    """A scheduling policy without recomputation that prefers B to F, and runs W in idle gaps.

    Args:
        problem: a problem without recomputation.
        groups: sizes of the microbatch groups that pass through the chunks; all ranks run F in the order of the groups.
        weight_rule: whether a W may run in an idle gap that is shorter than the W.
        forward_rule: whether an F may run in an idle gap that is shorter than the F.
        in_flight_limits: rank -> largest number of microbatches in flight on the rank, summed over the rank's chunks;
            None if only memory limits this number.
    """

    weight = 3

    def __init__(
        self,
        problem: Problem,
        groups: Sequence[int],
        weight_rule: GapRule = GapRule.BALANCED,
        forward_rule: GapRule = GapRule.ALWAYS,
        in_flight_limits: Sequence[int] | None = None,
    ) -> None:
        super().__init__(problem)
        assert not problem.recomputes, "the policy does not plan recomputation"
        self.in_flight_limits = in_flight_limits or (problem.num_microbatches * problem.num_stages,) * problem.num_ranks
        self.weight_rule, self.forward_rule = weight_rule, forward_rule
        self.queues = [tuple(map(deque, grouped_order(problem, rank, groups))) for rank in range(problem.num_ranks)]
        """Rank -> (codes of the F, codes of the B) that the rank has not run, in the order of the groups."""

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        (forwards, backwards), weights = self.queues[rank], self.weights[rank]
        b, b_ready = self.next_backward(rank, now)
        if b_ready <= now:
            backwards.remove(b)
            return b, now
        f_ready = inf
        if forwards and len(backwards) - len(forwards) < self.in_flight_limits[rank]:
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
        """Code of the first ready B in the rank's order (-1 without a ready B), and the earliest start time of a B."""
        # The body of `next_arrival` is repeated instead of called, because this loop takes much of the planning time.
        done, arrivals, size = self.done, self.arrivals, self.num_stages
        ready, soonest = [], inf
        for stage in self.problem.stages_of[rank]:
            code = size + stage
            known, count = arrivals[code], done[code]
            if count < len(known):
                arrival = known[count]
                if arrival <= now:
                    ready.append(code)
                    soonest = now
                elif arrival < soonest:
                    soonest = arrival
        if len(ready) > 1:
            return min(ready, key=self.queues[rank][1].index), soonest
        return (ready[0] if ready else -1), soonest

    def has_room(self, rank: int, f: int) -> bool:
        """Whether the F `f` and all remaining F of the rank's oldest unfinished microbatch fit in memory together.

        Memory for all F of the oldest unfinished microbatch is reserved, so that later microbatches cannot use this
        memory.
        """
        if self.memory[rank] + self.allocation[f] > self.limits[rank]:
            return False
        stages = self.problem.stages_of[rank]
        started = [self.done[stage] + (stage == f) for stage in stages]
        oldest = started[-1]
        is_unfinished = oldest < self.num_microbatches
        reserved = sum(
            self.allocation[stage] * (number - oldest + (is_unfinished and number == oldest))
            for stage, number in zip(stages, started, strict=True)
        )
        return reserved <= self.limits[rank]
