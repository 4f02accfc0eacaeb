"""A lower bound on the longest span of a rank, over all schedules with a given placement, costs and memory limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, inf
from operator import sub

from megatron.zero_bubble.planner.request import limits_of_ranks
from megatron.zero_bubble.schedule.costs import SHARD_TIMES, StageCosts
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.recomputation import Recompute


def lower_bound(
    placement: Placement,
    num_microbatches: int,
    costs: StageCosts,
    memory_limit: float | Sequence[float] | None = None,
    recompute: Recompute = Recompute.NONE,
) -> float:
    """A lower bound on `Timeline.cost`, the longest span of a rank, for schedules within the memory limits.

    The bound holds with and without overlap of communication, and for schedules with and without fused B and W. It is
    the larger of two bounds. The first is the longest path from the first F of a rank through later stages to the last
    W of the same rank, with the idle time that the memory limit causes. Without a limit, for m microbatches, p equal
    stages and messages of time C, the path takes (m + p - 1)(F + B) + 2 (p - 1) C + W (Qi et al. 2024, arXiv
    2401.10241). The second is the integral of the memory of all microbatches over time, divided by the limit.

    Args:
        placement: placement of the stages on the ranks.
        num_microbatches: microbatches of an iteration.
        costs: costs of the stages.
        memory_limit: memory limit of the ranks, as one value for all ranks or one value per rank, in the unit of memory
            of the costs; None for no limit.
        recompute: which microbatches have an R (recomputation). A microbatch with an R takes `costs.memory_r` less
            memory between its F and its R. The time of R is part of the bound only under full recomputation.

    Raises:
        ScheduleError: the placement and the costs differ in their number of stages, the placement and the limits differ
            in their number of ranks, or there is no microbatch.
    """
    if costs.num_stages != placement.num_stages:
        raise ScheduleError(
            f"the placement has {placement.num_stages} stages, but the costs are for {costs.num_stages}"
        )
    costs = costs.with_cheapest_weight_gradients
    limits = limits_of_ranks(inf if memory_limit is None else memory_limit, placement.num_ranks)
    if num_microbatches < 1:
        raise ScheduleError(f"a lower bound needs at least one microbatch, got {num_microbatches}")
    path = _Path(placement, costs, recompute)
    ranks = [_Rank(path, rank, num_microbatches, limit) for rank, limit in enumerate(limits)]
    return max(_through_others(path, ranks), *(rank.memory_time for rank in ranks))


def _through_others(path: _Path, ranks: Sequence[_Rank]) -> float:
    """Length of the longest path from the first F of a rank, through another rank, back to the last W of the same rank.

    The path goes forward from stage `a` to a later stage `k`, then through all operations between the first F and the
    last B on the rank of stage `k`, and then backward from stage `k` to stage `a`.
    """
    costs, longest, through = path.costs, 0.0, -inf
    for rank in sorted(ranks, key=lambda rank: rank.first, reverse=True):
        stage = rank.first
        # The least time between two stages, forward and backward, is the difference of their distances from stage 0.
        distance = path.starts_f[stage] + path.ends_b[stage]
        through = max(through, distance + rank.window)
        by_work = rank.work + max(0, rank.idle - rank.recomputation - rank.vocabulary)
        longest = max(longest, through - distance + costs.time_w[stage], by_work)
    return longest


class _Path:
    """Least times in which one microbatch passes from one stage to another, as sums of the costs of the stages."""

    def __init__(self, placement: Placement, costs: StageCosts, recompute: Recompute) -> None:
        self.placement = placement
        self.recompute = recompute
        self.costs = costs
        self.memory = costs.memory_f
        """Stage -> least memory of a microbatch between the start of F and the start of B."""
        if recompute is not Recompute.NONE:
            self.memory = tuple(map(sub, costs.memory_f, costs.memory_r))
        self.starts_f: list[float] = [0]
        """Stage s -> least time from the start of F on stage 0 to the start of F on stage s."""
        self.ends_b: list[float] = [0]
        """Stage s -> least time from the end of B on stage s to the end of B on stage 0."""
        for s, message in enumerate(costs.messages(placement)):
            self.starts_f.append(self.starts_f[-1] + costs.time_f[s] + message)
            self.ends_b.append(self.ends_b[-1] + costs.time_b[s] + message)

    def forward(self, a: int, k: int) -> float:
        """Least time from the start of F on stage a to the start of F on a later stage k."""
        return self.starts_f[k] - self.starts_f[a]

    def backward(self, k: int, a: int) -> float:
        """Least time from the end of B on stage k to the end of B on an earlier stage a."""
        return self.ends_b[k] - self.ends_b[a]

    def turn(self, stage: int) -> float:
        """Least time from the end of F to the start of B on the same stage, through the last stage and back."""
        last = self.placement.num_stages - 1
        to_last = self.forward(stage, last) + self.costs.time_f[last] - self.costs.time_f[stage]
        from_last = self.costs.time_b[last] + self.backward(last, stage) - self.costs.time_b[stage]
        return to_last + from_last if stage < last else 0

    def recomputation(self, stage: int) -> float:
        """Least time that full recomputation of a microbatch adds to a rank; zero without full recomputation.

        A rank either runs an R, or runs B directly after F and is idle in between.
        """
        return min(self.costs.time_r[stage], self.turn(stage)) if self.recompute is Recompute.FULL else 0


@dataclass(frozen=True)
class _Rank:
    """Lower bounds on the times of one rank under its memory limit."""

    path: _Path
    rank: int
    num_microbatches: int
    limit: float

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return self.path.placement.stages_of(self.rank)

    @property
    def first(self) -> int:
        return self.stages[0]

    @property
    def work(self) -> float:
        return self.num_microbatches * sum(self.path.costs.work(s) for s in self.stages) + self.recomputation

    @cached_property
    def recomputation(self) -> float:
        """Least time that recomputation of all microbatches adds to the rank (see `_Path.recomputation`)."""
        return self.num_microbatches * sum(self.path.recomputation(s) for s in self.stages)

    @property
    def vocabulary(self) -> float:
        """Total time of the operations on the rank's vocabulary shard; these operations may run in idle time."""
        times = [getattr(self.path.costs, name) for name in SHARD_TIMES]
        return self.num_microbatches * sum(time[s] for s in self.stages for time in times)

    @cached_property
    def available(self) -> float:
        """The memory limit of the rank; infinity if a stage releases more memory than it allocates."""
        costs = self.path.costs
        for s in self.stages:
            after_b = costs.memory_f[s] + costs.memory_b[s]
            if costs.memory_s[s] + costs.memory_t[s] < 0:
                return inf
            if self.path.memory[s] < 0 or after_b < 0 or after_b + costs.memory_w[s] < -1e-9 * costs.memory_f[s]:
                return inf
        return self.limit

    @cached_property
    def window(self) -> float:
        """Least time from the start of the first F to the end of the last B of the rank.

        The time from the first F to the last B is at least the sum of three times: the time of all F and B; the time of
        the W that must run before the last B to release memory; and the idle time or the time that recomputation adds,
        whichever is longer. R may run in idle time.
        """
        costs = self.path.costs
        f_and_b = self.num_microbatches * sum(costs.time_f[s] + costs.time_b[s] for s in self.stages)
        all_w = self.num_microbatches * sum(costs.time_w[s] for s in self.stages)
        is_divided = self.path.recompute is not Recompute.NONE and costs.blocks(self.first) > 1
        room = self.available - (0 if is_divided else costs.memory_f[self.first])
        deferred = self._longest_time(
            room, [(costs.time_w[s], costs.memory_f[s] + costs.memory_b[s]) for s in self.stages]
        )
        by_work = f_and_b + max(0, all_w - costs.time_w[self.first] - deferred) + max(self.idle, self.recomputation)
        return max(by_work, self.window_of_last_f)

    @property
    def window_of_last_f(self) -> float:
        """Lower bound on the time from the rank's first F to its last B: the length of a path through the last F.

        Before the last F, the rank runs enough B and W to release memory for that F. After the last F, the microbatch
        of that F still runs its forwards up to the last stage and its backwards down to this rank. With recomputation,
        the lower bound `window_of_last_f` is zero.
        """
        costs, last = self.path.costs, self.stages[-1]
        if self.path.recompute is not Recompute.NONE:
            return 0
        rates = [
            max(-costs.memory_b[s] / costs.time_b[s], costs.memory_f[s] / (costs.time_b[s] + costs.time_w[s]))
            for s in self.stages
        ]
        to_release = self.num_microbatches * sum(costs.memory_f[s] for s in self.stages) - self.available
        release = to_release / max(rates) if to_release > 0 and max(rates) > 0 else 0
        all_f = self.num_microbatches * sum(costs.time_f[s] for s in self.stages)
        after_f = self.path.turn(last) + costs.time_b[last] + self.path.backward(last, self.first)
        return all_f + release + after_f + (0 if self.all_fit else self.idle_before_b)

    @cached_property
    def idle(self) -> float:
        """Least idle time of the rank between its first F and its last B.

        If memory is too small for all microbatches at once, the last F comes after the first B, so that the idle time
        before the first B and the idle time after the last F add up.
        """
        return max(self.idle_before_b, self.idle_after_f) if self.all_fit else self.idle_before_b + self.idle_after_f

    @property
    def all_fit(self) -> bool:
        """Whether the activations of all microbatches fit in the memory limit at once."""
        in_flight = sum(self.path.memory[s] for s in self.stages)
        return self.num_microbatches * in_flight <= self.available * (1 + 1e-9)

    @property
    def idle_before_b(self) -> float:
        """Least idle time from the first F to the first B; until the first B a rank runs only F that fit in memory."""
        costs, last = self.path.costs, self.stages[-1]
        wait = self.path.forward(self.first, last) + costs.time_f[last] + self.path.turn(last)
        return max(
            0, wait - self._longest_time(self.available, [(costs.time_f[s], self.path.memory[s]) for s in self.stages])
        )

    @property
    def idle_after_f(self) -> float:
        """Least idle time from the end of the last F to the start of the last B of the rank.

        Between its last F and its last B, a rank runs only B and W of the microbatches that are in flight at the last
        F. When the last F ends, the last microbatch is in flight on all stages of the rank.
        """
        costs, last = self.path.costs, self.stages[-1]
        wait = self.path.turn(last)
        own: float = 0
        if last != self.first:
            wait += costs.time_b[last] + self.path.backward(last, self.first) - costs.time_b[self.first]
            own = sum(costs.time_b[s] + costs.time_w[s] for s in self.stages[1:])
        room = self.available - sum(self.path.memory[s] for s in self.stages)
        items = []
        for s in self.stages:
            items.append((costs.time_b[s] + costs.time_w[s], self.path.memory[s]))
            items.append((costs.time_w[s], costs.memory_f[s] + costs.memory_b[s]))
        return max(0, wait - own - self._longest_time(room, items, self.num_microbatches - 1))

    @property
    def memory_time(self) -> float:
        """Least span of the rank: the integral of the microbatches' memory over time, divided by the memory limit.

        At the start and at the end of the span, less memory than the limit is in use, because memory rises only as fast
        as F can allocate memory, and falls only as fast as B and W can release memory. With recomputation the bound is
        zero, because R also allocates memory, and an F that drops activations allocates less memory.
        """
        costs, limit = self.path.costs, self.available
        if limit == inf or limit <= 0 or self.path.recompute is not Recompute.NONE:
            return 0
        needed: float = 0
        fill_rate = drain_rate = largest = 0.0
        for s in self.stages:
            f, b, w = costs.time_f[s], costs.time_b[s], costs.time_w[s]
            whole, after_b = costs.memory_f[s], costs.memory_f[s] + costs.memory_b[s]
            needed += self.num_microbatches * (whole * (f + self.path.turn(s) + b) + after_b * w)
            fill_rate = max(fill_rate, whole / f)
            drain_rate = max(drain_rate, whole / (b + w), after_b / w)
            largest = max(largest, whole)
            if after_b + costs.memory_w[s] > 1e-9 * whole:
                return 0  # W leaves memory allocated: memory does not fall to 0
        if fill_rate == 0 or drain_rate == 0:
            return 0
        ramp = max(0, limit - largest)
        ramps = ramp / fill_rate + ramp / drain_rate
        unused = ramp * ramps / 2
        if limit * ramps - unused < needed:  # memory rises to the limit before it falls
            return (needed + unused) / limit
        return needed / limit

    def _longest_time(self, capacity: float, items: Sequence[tuple[float, float]], copies: int | None = None) -> float:
        """Upper bound on the total time of items (time, memory) whose memory fits in `capacity`: a fractional knapsack.

        The knapsack takes each item at most `copies` times. The knapsack takes no fraction of an item if all items take
        the same memory.
        """
        if copies is None:
            copies = self.num_microbatches
        sizes = {memory for _, memory in items}
        if len(sizes) == 1 and capacity != inf and min(sizes) > 0:
            capacity = min(sizes) * floor(capacity / min(sizes) * (1 + 1e-9) + 1e-9)
        total: float = 0
        for time, memory in sorted(items, key=lambda item: item[0] / item[1] if item[1] > 0 else inf, reverse=True):
            if memory <= 0:
                total += time * copies
                continue
            count = min(copies, max(0, capacity) / memory)
            total += time * count
            capacity -= count * memory
        return total
