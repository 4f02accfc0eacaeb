"""Inserts W and R (recomputation) into a given order of F and B, in idle time where possible."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.event_loop import EventLoop
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.rules import KEEPS_WHAT_FITS, GapRule, Keeping
from megatron.zero_bubble.schedule.recomputation import Recompute


class InOrder(EventLoop):
    """A scheduling policy that runs F and B in a given order, and inserts W and R (recomputation).

    A W runs in three cases: in an idle gap that is at least as long as the W, when memory is full, and after the last
    B. The argument `rule` decides whether a W also runs in an idle gap that is shorter than the W. If the next F does
    not fit in memory and no W is ready, the next B of the order runs before that F. A recomputation (R) runs right
    before its B, or in an idle gap before the F that precedes its B.
    """

    def __init__(
        self, problem: Problem, orders: Sequence[Order], rule: GapRule, keeping: Keeping = KEEPS_WHAT_FITS
    ) -> None:
        super().__init__(problem)
        self.rule, self.keeping = rule, keeping
        self.recomputes = problem.recomputes
        self.input_orders = [list(order) for order in orders]
        self.position = [0] * problem.num_ranks

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        order, position, weights = self.input_orders[rank], self.position[rank], self.weights[rank]
        ready = inf
        if position < len(order):
            code = start = order[position]
            if code < self.num_stages:
                start = self.as_it_fits(rank, code)
                if start < 0:
                    if weights:
                        return weights[0], now
                    if not self.pull_backward(order, position):
                        return -1, inf
                    code = start = order[position]
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

    def as_it_fits(self, rank: int, code: int) -> int:
        """Choose whether the F `code` keeps or drops its activations; return the code of that F, or -1 to wait.

        Memory for the largest pending R (recomputation) is reserved, so that the R fits once every ready W has run.
        """
        memory, limit, keep = self.memory[rank], self.limits[rank], self.allocation[code]
        if not self.recomputes:
            return code if memory + keep <= limit else -1
        dropping = code + self.codes.drop
        drop, restored = self.allocation[dropping], self.allocation[code + self.codes.r]
        r, stages = self.codes.r, self.problem.stages_of[rank]
        for_r = max((self.allocation[r + s] for s in stages if self.done[r + s] < len(self.dropped[s])), default=0)
        without_weights = memory - self.releasable[rank]
        before_r = without_weights if self.keeping.defers_weights else memory
        keeps = self.will_keep(rank, code)
        if keeps and memory + keep <= limit and before_r + keep + for_r <= limit:
            return code
        if keeps and not self.keeping.defers_weights and without_weights + keep + for_r <= limit:
            return -1
        if not self.keeping.may_drop(self.done[code], self.num_microbatches):
            return -1
        return dropping if memory + drop <= limit and before_r + drop + max(restored, for_r) <= limit else -1

    def will_keep(self, rank: int, code: int) -> bool:
        """Whether F `code` keeps activations that fit in memory; true on the last stage if B directly follows."""
        order, following, size = self.input_orders[rank], self.position[rank] + 1, self.num_stages
        if code == size - 1 and following < len(order) and order[following] == code + size:
            return True
        return self.problem.recompute is not Recompute.FULL and (code, self.done[code]) not in self.keeping.drops

    def needs_r(self, stage: int) -> bool:
        """Whether the next B of `stage` has to wait for the recomputation (R) of its microbatch."""
        dropped, restored = self.dropped[stage], self.done[self.codes.r + stage]
        return restored < len(dropped) and dropped[restored] == self.done[self.codes.b + stage]

    def early_r(self, rank: int, f: int, gap: float) -> int:
        """Code of an R that can run before the F `f`: the R for the B right after `f` in the order of the rank.

        The code is -1 in three cases: the operation after the F `f` is not a B that needs an R, the R does not fit in
        memory, or the R takes longer than the idle time `gap` before `f`.
        """
        order, following, size = self.input_orders[rank], self.position[rank] + 1, self.num_stages
        code = order[following] if following < len(order) else f
        if not size <= code < self.codes.w or not self.needs_r(code - size):
            return -1
        r = code - size + self.codes.r
        room = self.limits[rank] - self.memory[rank] - self.allocation[r] - self.allocation[f]
        return r if self.duration[r] <= gap + 2 * self.epsilon and room >= 0 else -1

    def pull_backward(self, order: Order, position: int) -> bool:
        """Move the next B of an order to the position `position`; return False if no B is left in the order."""
        for later in range(position, len(order)):
            if order[later] >= self.num_stages:
                order.insert(position, order.pop(later))
                return True
        return False
