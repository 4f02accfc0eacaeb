"""Inserts W into a given order of F and B where it costs least."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from megatron.zero_bubble.schedule.search.event_loop import EventLoop, GapRule, PlannedOrders
from megatron.zero_bubble.schedule.search.problem import Order, Problem


def fill_weights(problem: Problem, orders: Sequence[Order], rule: GapRule, target: float = 0) -> PlannedOrders | None:
    """The plan that runs F and B in the given order, and W in between.

    W runs in gaps that are long enough, where memory is full, at the end, and in shorter gaps as `rule` says;
    `target` is a span that `BALANCED` does not try to get below. If a rank lacks the memory for its next F, and
    has no W to run, its next B goes first. None if the ranks then wait for each other for ever.
    """
    return _Filling(problem, orders, rule, target).run()


class _Filling(EventLoop):
    def __init__(self, problem: Problem, orders: Sequence[Order], rule: GapRule, target: float) -> None:
        super().__init__(problem, target)
        self.rule = rule
        self.given = [list(order) for order in orders]
        self.position = [0] * problem.num_ranks
        self.weights: list[deque[int]] = [deque() for _ in orders]
        """Rank -> the W that it may run, in the order of their B."""

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        given, position, weights = self.given[rank], self.position[rank], self.weights[rank]
        ready = inf
        if position < len(given):
            code = given[position]
            if code < self.num_stages and self.held[rank] + self.allocation[code] > self.limits[rank]:
                if weights:
                    return weights.popleft(), now
                if not self.pull_backward(given, position):
                    return -1, inf
                code = given[position]
            arrivals = self.arrivals[code]
            if self.done[code] < len(arrivals):
                ready = arrivals[self.done[code]]
            if ready <= now:
                self.position[rank] = position + 1
                if code >= self.num_stages:
                    weights.append(code + self.num_stages)
                return code, now
        if weights and self.fills(rank, now, ready, self.duration[weights[0]], self.rule):
            return weights.popleft(), now
        return -1, ready

    def pull_backward(self, given: Order, position: int) -> bool:
        """Move the next B of the order to `position`; False if there is none."""
        for later in range(position, len(given)):
            if given[later] >= self.num_stages:
                given.insert(position, given.pop(later))
                return True
        return False


def run_in_order(problem: Problem, orders: Sequence[Order]) -> PlannedOrders | None:
    """The plan that runs complete orders as they are; None if they exceed a limit, or wait for ever."""
    for order, limit in zip(orders, problem.limits, strict=True):
        held = peak = 0.0
        for code in order:
            held += problem.allocation[code]
            peak = max(peak, held)
        if peak > limit * (1 + 1e-9):
            return None
    return _InOrder(problem, orders).run()


class _InOrder(EventLoop):
    def __init__(self, problem: Problem, orders: Sequence[Order]) -> None:
        super().__init__(problem, 0)
        self.given = orders

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        position = len(self.orders[rank])
        if position == len(self.given[rank]):
            return -1, inf
        code = self.given[rank][position]
        if code >= 2 * self.num_stages:
            return code, now
        arrivals = self.arrivals[code]
        ready = arrivals[self.done[code]] if self.done[code] < len(arrivals) else inf
        return (code, now) if ready <= now else (-1, ready)
