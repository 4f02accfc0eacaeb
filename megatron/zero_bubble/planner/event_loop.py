"""The planner's event loop, which simulates ranks that run operations and wait for inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import tolerance
from megatron.zero_bubble.planner.rules import GapRule
from megatron.zero_bubble.schedule.shard_ops import LEAD


class PlannedOrders(NamedTuple):
    """Complete orders of all ranks, with their simulated times."""

    cost: float
    """The time by which orders are compared: the longest span of a rank, or the makespan."""
    orders: list[Order]
    """Rank -> its order of operations."""
    tie: float
    """Decides between orders of equal cost: the makespan if the cost is the longest span, else the longest span."""


class EventLoop(ABC):
    """Event-driven simulation of all ranks; a subclass is a policy that chooses the next operation of an idle rank.

    `choose` is called when a rank ends an operation and when a result arrives at an idle rank. The arrival time of a
    result is known as soon as the operation that computes the result starts, so that a policy can plan ahead. A
    simulation takes time O(n log p) for n operations on p ranks.

    With vocabulary shards, an idle rank runs a ready loss, softmax or embedding before all other operations, because
    the backward of the last stage waits for all ranks. A weight gradient of a vocabulary shard is treated as a W.

    Attributes:
        weight: processor time that the policy takes to plan an operation, relative to the fastest policy.
    """

    weight = 1

    def __init__(self, problem: Problem) -> None:
        codes, ranks = problem.codes, problem.num_ranks
        self.problem = problem
        self.codes = codes
        self.num_stages = codes.b
        self.has_shards = problem.has_shards
        self.num_microbatches = problem.num_microbatches
        self.ranks = problem.ranks
        self.duration = problem.duration
        self.latency = problem.latency
        self.users = problem.users
        self.allocation = problem.allocation
        self.work = list(problem.work)
        """Rank -> total time of its operations, including every R that is known to be needed (see `Problem.work`)."""
        self.full_limits = [limit + tolerance(limit) for limit in problem.limits]
        self.limits = self.full_limits
        """Rank -> its memory limit, minus the memory of one softmax if the rank has a vocabulary shard."""
        self.epsilon = 1e-9 * max(problem.duration)
        self.target = 0.0
        """The longest span of any rank, under the assumption that no rank idles again."""
        self.arrivals: list[list[float]] = [[] for _ in range(codes.end)]
        """Code of an operation -> known arrival times of the operation's inputs, by microbatch."""
        self.arrivals[codes.f] = [0.0] * self.num_microbatches
        self.done = [0] * codes.end
        """Operation code -> number of started operations; an F that drops activations counts under `Codes.f`."""
        self.dropped: list[list[int]] = [[] for _ in range(self.num_stages)]
        """Stage -> the microbatches whose activations have been dropped."""
        self.weights: list[deque[int]] = [deque() for _ in range(ranks)]
        """Rank -> the weight gradients that are ready to run, in the order in which they became ready."""
        self.releasable = [0.0] * ranks
        """Rank -> the memory that its ready weight gradients will release."""
        self.free = [0.0] * ranks
        self.has_started = [False] * ranks
        self.span_start = [0.0] * ranks
        self.end = [0.0] * ranks
        """Rank -> time at which the result of the rank's latest operation is computed, before the result is sent."""
        self.worked = [0.0] * ranks
        self.memory = [0.0] * ranks
        self.orders: list[Order] = [[] for _ in range(ranks)]
        self._due = [0] * ranks
        """Rank -> number of loss and shard operations with known arrival times that neither ran nor entered
        `weights`."""
        if self.has_shards:
            self.limits = [limit - problem.allocation[codes.s + r] for r, limit in enumerate(self.full_limits)]
            self.arrivals[codes.f] = []
            self.arrivals[codes.e] = [0.0] * min(LEAD, self.num_microbatches)
            self._missing = {code: [ranks] * self.num_microbatches for code in (codes.f, codes.loss)}
            """Code of an operation that needs all ranks' results -> microbatch -> number of unknown arrival times."""
            self._latest = {code: [0.0] * self.num_microbatches for code in self._missing}
            """Code of an operation that needs all ranks' results -> microbatch -> latest known arrival of a result."""
            self._moved = [0] * codes.end
            """Code of a weight gradient of a shard -> number of microbatches whose gradient has entered `weights`."""
            self._shard_weights = [(codes.t + rank, codes.ew + rank) for rank in range(ranks)]
            """Rank -> codes of the weight gradients of its shard."""
            self._urgent: list[tuple[int, ...]] = [(codes.s + rank, codes.e + rank) for rank in range(ranks)]
            """Rank -> codes of operations that the rank runs as soon as they are ready: loss, softmax and embedding."""
            last = problem.rank_of[-1]
            self._urgent[last] = (codes.loss, *self._urgent[last])
            self._due[problem.rank_of[0]] = len(self.arrivals[codes.e])

    @abstractmethod
    def choose(self, rank: int, now: float) -> tuple[int, float]:
        """Choose the next operation of an idle rank.

        Returns:
            (code, now) to run an operation; (-1, t) to idle until time t; (-1, inf) to idle until an input arrives.
        """

    def run(self, longest: float = inf) -> PlannedOrders | None:
        """Simulate all ranks and return the plan; None if the ranks deadlock, or if the simulation ends early.

        The simulation ends early as soon as it is known that the longest span of a rank will exceed `longest`.
        """
        free, epsilon, choose, start = self.free, self.epsilon, self.choose, self.start
        due, longest = self._due, longest + tolerance(longest)
        events = [(0.0, self.problem.rank_of[0])]
        while events:
            now, rank = heappop(events)
            if now < free[rank]:
                continue  # the rank is busy, and has another event at the end of its operation
            code, when = self.shard_op(rank, now + epsilon) if due[rank] else -1, inf
            if code < 0:
                code, when = choose(rank, now + epsilon)
            if code >= 0:
                start(code, rank, now, events)
                if self.target > longest:
                    return None
            elif when < inf:
                heappush(events, (when, rank))
        if sum(map(len, self.orders)) - sum(map(len, self.dropped)) < self.problem.num_ops:
            return None
        cost, tie = self.problem.judged_spans(self.span_start, self.end)
        return PlannedOrders(cost, self.orders, tie)

    def start(self, code: int, rank: int, now: float, events: list[tuple[float, int]]) -> None:
        """Start the operation `code` on `rank` at the time `now`."""
        codes, size = self.codes, self.num_stages
        if self.has_started[rank]:
            span = now - self.span_start[rank] + self.work[rank] - self.worked[rank]
            if span > self.target:
                self.target = span
        elif not codes.e <= code < codes.ew:
            # The rank's span starts with this operation. Earlier embeddings add only their own time to the span.
            self.has_started[rank] = True
            self.span_start[rank] = now + self.problem.receiving[code] - self.worked[rank]
        self.orders[rank].append(code)
        duration = self.duration[code]
        self.end[rank] = end = now + self.latency[code]
        self.free[rank] = free = now + duration
        self.worked[rank] += duration
        self.memory[rank] += self.allocation[code]
        heappush(events, (free, rank))
        if codes.drop <= code < codes.e:
            code -= codes.drop
            self.dropped[code].append(self.done[code])
            if not self.problem.is_dropped_as_a_rule(code):
                self.work[rank] += self.duration[codes.r + code]
        self.note_results(code, rank, end, events)
        if code < codes.b:
            if self.has_shards and code == codes.f and len(self.arrivals[codes.e]) < self.num_microbatches:
                self.arrivals[codes.e].append(now)
                self._due[rank] += 1
        elif code < codes.w:
            self.offer_weight(code + size, rank)
        elif code < codes.r or codes.ew <= code < codes.s or code >= codes.t:
            self.remove_weight(code, rank)
        elif code >= codes.e:
            self._due[rank] -= 1

    def note_results(self, code: int, rank: int, end: float, events: list[tuple[float, int]]) -> None:
        """Record for the users of operation `code` that the operation's next result is ready at time `end`.

        If the rank of a user may be idle, add an event at the time at which the result arrives.
        """
        microbatch = self.done[code]
        self.done[code] += 1
        free, ranks, arrivals = self.free, self.ranks, self.arrivals
        for user, latency in self.users[code]:
            when, receiver, source = end + latency, ranks[user], rank
            if self.has_shards:
                if user in self._missing:
                    self._missing[user][microbatch] -= 1
                    self._latest[user][microbatch] = when = max(when, self._latest[user][microbatch])
                    if self._missing[user][microbatch]:
                        continue
                    source = -1  # the latest result may come from another rank
                self._due[receiver] += user >= self.codes.e
            arrivals[user].append(when)
            if receiver != source and when >= free[receiver]:
                heappush(events, (when, receiver))

    def remove_weight(self, code: int, rank: int) -> None:
        """Remove a W from the queue of ready W of its rank, because the W starts to run."""
        weights = self.weights[rank]
        if weights and weights[0] == code:
            weights.popleft()
        else:
            weights.remove(code)
        self.releasable[rank] += self.allocation[code]

    def offer_weight(self, code: int, rank: int) -> None:
        """Add a W to the queue of ready W of its rank."""
        self.weights[rank].append(code)
        self.releasable[rank] -= self.allocation[code]

    def shard_op(self, rank: int, now: float) -> int:
        """Return a ready loss, softmax or embedding that fits in memory, or a W that frees memory for it, or -1."""
        arrivals, done, moved = self.arrivals, self.done, self._moved
        for code in self._shard_weights[rank]:
            known = arrivals[code]
            while moved[code] < len(known) and known[moved[code]] <= now:
                self.offer_weight(code, rank)
                moved[code] += 1
                self._due[rank] -= 1
        for code in self._urgent[rank]:
            known, count = arrivals[code], done[code]
            if count < len(known) and known[count] <= now:
                if self.memory[rank] + self.allocation[code] <= self.full_limits[rank]:
                    return code
                if self.weights[rank]:
                    return self.weights[rank][0]
        return -1

    def next_arrival(self, code: int, now: float) -> float:
        """Earliest start time of the next operation with code `code`; inf while an input's arrival time is unknown."""
        count, arrivals = self.done[code], self.arrivals[code]
        return max(now, arrivals[count]) if count < len(arrivals) else inf

    def span_so_far(self, rank: int, now: float) -> float:
        """The span of `rank` if the rank never idles after the time `now`."""
        if not self.has_started[rank]:
            return self.work[rank]
        return now - self.span_start[rank] + self.work[rank] - self.worked[rank]

    def fills(self, rank: int, now: float, ready: float, duration: float, rule: GapRule) -> bool:
        """Whether `rank` starts an operation of length `duration` in the idle gap from time `now` to time `ready`."""
        if now + duration <= ready + 2 * self.epsilon or rule is GapRule.ALWAYS:
            return True
        return rule is GapRule.BALANCED and self.span_so_far(rank, ready) > self.target + self.epsilon
