"""The event loop of the planners: simulates ranks that run operations and wait for the arrival of inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from megatron.zero_bubble.schedule.search.problem import Order, Problem


class GapRule(Enum):
    """Whether an operation fills a gap that is shorter than it, and so delays the operation that ends the gap."""

    ALWAYS = "always"
    NEVER = "never"
    BALANCED = "balanced"
    """If leaving the gap would raise the longest span over all ranks (arXiv 2401.10241, section 3.1)."""


class PlannedOrders(NamedTuple):
    """Complete orders of all ranks, and the longest span of a rank."""

    cost: float
    orders: list[Order]


class EventLoop(ABC):
    """Runs every rank by events; a subclass says in `choose` what a free rank does next.

    A rank is asked when it ends an operation and when something arrives for it. What arrives is known from
    the moment its producer starts, so that a rank can look ahead. Takes time linear in the number of
    operations, times the logarithm of the number of ranks.
    """

    def __init__(self, problem: Problem, target: float) -> None:
        size = problem.num_stages
        ranks = problem.num_ranks
        self.problem = problem
        self.num_stages = size
        self.num_microbatches = problem.num_microbatches
        self.duration = problem.duration
        self.latency = problem.latency
        self.allocation = problem.allocation
        self.work = list(problem.work)
        """Rank -> time that all its operations occupy it, going by the microbatches that it has dropped so far."""
        largest = max(max(problem.limits), max(map(abs, problem.allocation)))
        self.limits = [limit + 1e-9 * largest for limit in problem.limits]
        self.epsilon = 1e-9 * max(problem.duration)
        self.target = target
        """The longest span that any rank can still keep, going by its idle time so far."""
        self.arrivals: list[list[float]] = [[] for _ in range(2 * size)]
        """Code of F or B -> when its inputs are there, for every microbatch for which that is known."""
        self.arrivals[0] = [0.0] * self.num_microbatches
        self.done = [0] * (4 * size)
        """Code -> how many microbatches have started it; an F counts as F, whether it drops or keeps."""
        self.dropped: list[list[int]] = [[] for _ in range(size)]
        """Stage -> the microbatches whose activations it has dropped."""
        self.free = [0.0] * ranks
        self.begin = [0.0] * ranks
        self.end = [0.0] * ranks
        """Rank -> the result of its latest operation; its span does not count what it sends after that."""
        self.worked = [0.0] * ranks
        self.held = [0.0] * ranks
        self.orders: list[Order] = [[] for _ in range(ranks)]

    @abstractmethod
    def choose(self, rank: int, now: float) -> tuple[int, float]:
        """What `rank`, free at `now`, does next: (code, now), or (-1, when to ask again; inf: when something comes)."""

    def run(self) -> PlannedOrders | None:
        """The plan; None if the ranks wait for each other for ever."""
        free, epsilon, choose, start = self.free, self.epsilon, self.choose, self.start
        events = [(0.0, self.problem.rank_of[0])]
        while events:
            now, rank = heappop(events)
            if now < free[rank]:
                continue  # still busy: asked again at the end of the operation
            code, when = choose(rank, now + epsilon)
            if code >= 0:
                start(code, rank, now, events)
            elif when < inf:
                heappush(events, (when, rank))
        if sum(self.done[: 3 * self.num_stages]) < self.problem.num_ops:
            return None
        return PlannedOrders(max(end - begin for begin, end in zip(self.begin, self.end, strict=True)), self.orders)

    def start(self, code: int, rank: int, now: float, events: list[tuple[float, int]]) -> None:
        """Run the operation `code` on `rank`, from `now`."""
        if self.orders[rank]:
            span = self.span_so_far(rank, now)
            if span > self.target:
                self.target = span
        else:
            self.begin[rank] = now + self.problem.receiving[code]
        self.orders[rank].append(code)
        size = self.num_stages
        if code >= 4 * size:
            self.drop(code - 4 * size, rank)
        self.done[code % (4 * size)] += 1
        duration = self.duration[code]
        end = now + self.latency[code]
        self.end[rank] = end
        self.free[rank] = now + duration
        self.worked[rank] += duration
        self.held[rank] += self.allocation[code]
        heappush(events, (self.free[rank], rank))
        if code >= 4 * size:
            code -= 4 * size
        if code < size:
            if code + 1 < size:
                self.arrive(code + 1, end + self.problem.message[code], rank, events)
            else:
                self.arrivals[size + code].append(end)
        elif size < code < 2 * size:
            self.arrive(code - 1, end + self.problem.message[code - size - 1], rank, events)

    def drop(self, stage: int, rank: int) -> None:
        """Note that the next microbatch of `stage` needs an R."""
        self.dropped[stage].append(self.done[stage])
        if not self.problem.is_dropped_as_a_rule(stage):
            self.work[rank] += self.duration[3 * self.num_stages + stage]

    def needs_r(self, stage: int) -> bool:
        """Whether the microbatch of the next B of `stage` is dropped, and has had no R."""
        dropped, restored = self.dropped[stage], self.done[3 * self.num_stages + stage]
        return restored < len(dropped) and dropped[restored] == self.done[self.num_stages + stage]

    def arrive(self, code: int, when: float, source: int, events: list[tuple[float, int]]) -> None:
        """Note that an input of `code` arrives at `when`, and wake its rank."""
        self.arrivals[code].append(when)
        rank = self.problem.rank_of[code % self.num_stages]
        if rank != source:
            heappush(events, (when, rank))

    def span_so_far(self, rank: int, now: float) -> float:
        """What the span of `rank` will be if it never idles again from `now` on."""
        if not self.orders[rank]:
            return self.work[rank]
        return now - self.begin[rank] + self.work[rank] - self.worked[rank]

    def fills(self, rank: int, now: float, ready: float, duration: float, rule: GapRule) -> bool:
        """Whether an operation of this duration goes before the one that is ready at `ready`."""
        if now + duration <= ready + 2 * self.epsilon or rule is GapRule.ALWAYS:
            return True
        return rule is GapRule.BALANCED and self.span_so_far(rank, ready) > self.target + self.epsilon
