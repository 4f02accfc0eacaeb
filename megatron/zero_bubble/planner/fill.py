"""Inserts W and R (recomputation) into a given order of F and B, in idle time where possible."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.event_loop import EventLoop
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.rules import KEEPS_WHAT_FITS, GapRule, Keeping


class InOrder(EventLoop):
    """A scheduling policy that runs F and B in a given order, and inserts W and R (recomputation).

    A W runs in three cases: in an idle gap that is at least as long as the W, when memory is full, and after the last
    B. The argument `rule` decides whether a W also runs in an idle gap that is shorter than the W. If the next F does
    not fit in memory and no W is ready, the next B of the order runs before that F. A recomputation (R) runs right
    before its B, or in a gap before the F that precedes its B.
    """

    def __init__(
        self, problem: Problem, orders: Sequence[Order], rule: GapRule, keeping: Keeping = KEEPS_WHAT_FITS
    ) -> None:
        super().__init__(problem, keeping)
        self.rule = rule
        self.given = [list(order) for order in orders]
        self.position = [0] * problem.num_ranks

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        given, position, weights = self.given[rank], self.position[rank], self.weights[rank]
        ready = inf
        if position < len(given):
            code = start = given[position]
            if code < self.num_stages:
                start = self.as_it_fits(rank, code)
                if start < 0:
                    if weights:
                        return weights[0], now
                    if not self.pull_backward(given, position):
                        return -1, inf
                    code = start = given[position]
            if self.recomputes and code >= self.num_stages and self.needs_r(code - self.num_stages):
                r = code - self.codes.b + self.codes.r
                if weights and self.memory[rank] + self.allocation[r] > self.limits[rank]:
                    return weights[0], now
                return r, now
            arrivals = self.arrivals[code]
            if self.done[code] < len(arrivals):
                ready = arrivals[self.done[code]]
            if ready <= now:
                self.position[rank] = position + 1
                return start, now
            if self.recomputes and code < self.num_stages:
                r = self.early_r(rank, start, ready - now)
                if r >= 0:
                    return r, now
        if weights and self.fills(rank, now, ready, self.duration[weights[0]], self.rule):
            return weights[0], now
        return -1, ready

    def will_keep(self, rank: int, code: int) -> bool:
        """Whether F `code` keeps its activations if they fit; always true on the last stage if its B runs next."""
        given, following, size = self.given[rank], self.position[rank] + 1, self.num_stages
        if code == size - 1 and following < len(given) and given[following] == code + size:
            return True
        return super().will_keep(rank, code)

    def early_r(self, rank: int, f: int, gap: float) -> int:
        """Code of the R for the B that directly follows the F `f` in the order of the rank.

        The code is -1 in three cases: no B with an R directly follows the F `f`, the R does not fit in memory, or the R
        takes longer than the idle time `gap` before `f`.
        """
        given, following, size = self.given[rank], self.position[rank] + 1, self.num_stages
        code = given[following] if following < len(given) else f
        if not size <= code < self.codes.w or not self.needs_r(code - size):
            return -1
        r = code - size + self.codes.r
        room = self.limits[rank] - self.memory[rank] - self.allocation[r] - self.allocation[f]
        return r if self.duration[r] <= gap + 2 * self.epsilon and room >= 0 else -1

    def pull_backward(self, given: Order, position: int) -> bool:
        """Move the next B of the order to `position`; return False if the order has no further B."""
        for later in range(position, len(given)):
            if given[later] >= self.num_stages:
                given.insert(position, given.pop(later))
                return True
        return False
