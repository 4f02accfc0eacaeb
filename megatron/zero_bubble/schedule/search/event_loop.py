"""The event loop of the planners: simulates ranks that run operations and wait for the arrival of inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.search.problem import Order, Problem


class GapRule(Enum):
    """Whether an operation fills a gap that is shorter than it, and so delays the operation that ends the gap."""

    ALWAYS = "always"
    NEVER = "never"
    BALANCED = "balanced"
    """If leaving the gap would raise the longest span over all ranks (arXiv 2401.10241, section 3.1)."""


@dataclass(frozen=True)
class Keeping:
    """Which microbatches keep their activations, where a problem recomputes."""

    defers_weights: bool = False
    """Whether memory that waiting W's hold is left to them, so that F drops, or runs before them, if it has to."""
    drops: AbstractSet[tuple[int, int]] = frozenset()
    """(stage, microbatch) to drop in any case."""
    first: int | None = None
    """How many microbatches may be dropped at the beginning, if not all."""
    last: int = 0
    """How many may be dropped at the end, if not all."""

    @classmethod
    def choices(cls, problem: Problem) -> tuple[Keeping, ...]:
        """The rules that drop only what does not fit: one where nothing is recomputed, two elsewhere."""
        return (cls(), cls(defers_weights=True))[: 1 + problem.recomputes]


KEEPS_WHAT_FITS = Keeping()


class PlannedOrders(NamedTuple):
    """Complete orders of all ranks, with the time by which they are judged, and that which decides between equals."""

    cost: float
    orders: list[Order]
    tie: float


class EventLoop(ABC):
    """Runs every rank by events; a subclass says in `choose` what a free rank does next.

    A rank is asked when it ends an operation and when something arrives for it. What arrives is known from
    the moment its producer starts, so that a rank can look ahead. Takes time linear in the number of
    operations, times the logarithm of the number of ranks.
    """

    def __init__(self, problem: Problem, target: float = 0, keeping: Keeping = KEEPS_WHAT_FITS) -> None:
        size = problem.num_stages
        ranks = problem.num_ranks
        self.problem = problem
        self.keeping = keeping
        self.recomputes = problem.recomputes
        self.num_stages = size
        self.num_microbatches = problem.num_microbatches
        self.duration = problem.duration
        self.latency = problem.latency
        self.message = problem.message
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
        span = max(end - begin for begin, end in zip(self.begin, self.end, strict=True))
        cost, tie = self.problem.judged(span, max(self.end) - min(self.begin))
        return PlannedOrders(cost, self.orders, tie)

    def start(self, code: int, rank: int, now: float, events: list[tuple[float, int]]) -> None:
        """Run the operation `code` on `rank`, from `now`."""
        order, size = self.orders[rank], self.num_stages
        if order:
            span = now - self.begin[rank] + self.work[rank] - self.worked[rank]
            if span > self.target:
                self.target = span
        else:
            self.begin[rank] = now + self.problem.receiving[code]
        order.append(code)
        duration = self.duration[code]
        self.end[rank] = end = now + self.latency[code]
        self.free[rank] = free = now + duration
        self.worked[rank] += duration
        self.held[rank] += self.allocation[code]
        heappush(events, (free, rank))
        if code >= 4 * size:
            code -= 4 * size
            self.drop(code, rank)
        self.done[code] += 1
        if code < size:
            if code + 1 < size:
                self.arrive(code + 1, end + self.message[code], rank, events)
            else:
                self.arrivals[size + code].append(end)
        elif size < code < 2 * size:
            self.arrive(code - 1, end + self.message[code - size - 1], rank, events)

    def drop(self, stage: int, rank: int) -> None:
        """Note that the next microbatch of `stage` needs an R."""
        self.dropped[stage].append(self.done[stage])
        if not self.problem.is_dropped_as_a_rule(stage):
            self.work[rank] += self.duration[3 * self.num_stages + stage]

    def needs_r(self, stage: int) -> bool:
        """Whether the microbatch of the next B of `stage` is dropped, and has had no R."""
        dropped, restored = self.dropped[stage], self.done[3 * self.num_stages + stage]
        return restored < len(dropped) and dropped[restored] == self.done[self.num_stages + stage]

    def as_it_fits(self, rank: int, code: int) -> int:
        """The F `code`, or the same F that drops its activations; -1 if a W or a B has to make room first.

        Room is kept for one restored microbatch: with every W done, the next R fits.
        """
        held, limit, keep = self.held[rank], self.limits[rank], self.allocation[code]
        if not self.recomputes:
            return code if held + keep <= limit else -1
        dropping = code + 4 * self.num_stages
        drop, restored = self.allocation[dropping], self.allocation[code + 3 * self.num_stages]
        to_restore = self.to_restore(rank)
        without_weights = held - self.releasable(rank)
        at_once = without_weights if self.keeping.defers_weights else held
        keeps = self.will_keep(rank, code)
        if keeps and held + keep <= limit and at_once + keep + to_restore <= limit:
            return code
        if keeps and not self.keeping.defers_weights and without_weights + keep + to_restore <= limit:
            return -1
        if keeps and not self.may_drop(code):
            return -1
        return dropping if held + drop <= limit and at_once + drop + max(restored, to_restore) <= limit else -1

    def will_keep(self, rank: int, code: int) -> bool:
        """Whether the F `code` keeps its activations, if they fit."""
        return self.problem.recompute is not Recompute.FULL and (code, self.done[code]) not in self.keeping.drops

    def may_drop(self, code: int) -> bool:
        """Whether the F `code` may drop its activations, if they do not fit."""
        first, microbatch = self.keeping.first, self.done[code]
        return first is None or microbatch < first or microbatch >= self.num_microbatches - self.keeping.last

    def to_restore(self, rank: int) -> float:
        """The most that any R of `rank` will allocate for the microbatches that it has dropped."""
        size = self.num_stages
        stages = self.problem.stages_of[rank]
        return max(
            (self.allocation[3 * size + s] for s in stages if self.done[3 * size + s] < len(self.dropped[s])), default=0
        )

    def releasable(self, rank: int) -> float:
        """What the waiting W's of `rank` hold."""
        b, w, done = self.num_stages, 2 * self.num_stages, self.done
        return -sum((done[b + s] - done[w + s]) * self.allocation[w + s] for s in self.problem.stages_of[rank])

    def arrive(self, code: int, when: float, source: int, events: list[tuple[float, int]]) -> None:
        """Note that an input of `code` arrives at `when`, and wake its rank."""
        self.arrivals[code].append(when)
        rank = self.problem.rank_of[code % self.num_stages]
        if rank != source:
            heappush(events, (when, rank))

    def next_arrival(self, code: int, now: float) -> float:
        """When the next operation `code` can start; inf if that is not known yet."""
        count, arrivals = self.done[code], self.arrivals[code]
        return max(now, arrivals[count]) if count < len(arrivals) else inf

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
