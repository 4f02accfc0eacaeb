"""List scheduling for a linear placement: each idle rank chooses its next operation by a few rules."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megatron.zero_bubble.planner.event_loop import KEEPS_WHAT_FITS, EventLoop, GapRule, Keeping, PlannedOrders
from megatron.zero_bubble.planner.problem import Problem


@dataclass(frozen=True)
class Policy:
    """How a rank decides. B comes before F, and W fills gaps, unless told otherwise."""

    weights: GapRule = GapRule.BALANCED
    """Whether W fills a gap that is too short for it."""
    forwards: GapRule = GapRule.ALWAYS
    """Whether F fills a gap that is too short for it."""
    caps: tuple[int, ...] | None = None
    """Rank -> how many microbatches may be between the start of F and the end of B; None: as many as memory allows."""
    keeping: Keeping = KEEPS_WHAT_FITS


def list_schedule(problem: Problem, policy: Policy) -> PlannedOrders | None:
    """The plan that `policy` leads to, for one chunk a rank.

    None only in corner cases: caps that leave ranks waiting, or a W that does not release all memory.
    """
    return _Greedy(problem, policy).run()


class _Greedy(EventLoop):
    def __init__(self, problem: Problem, policy: Policy) -> None:
        super().__init__(problem, keeping=policy.keeping)
        assert problem.num_stages == problem.num_ranks, "a rank has one F, one B and one W to choose from"
        self.policy = policy
        self.caps = policy.caps or (self.num_microbatches,) * problem.num_ranks

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        b, r, weights = self.codes.b + rank, self.codes.r + rank, self.weights[rank]
        f = self.as_it_fits(rank, rank) if self.done[rank] - self.done[b] < self.caps[rank] else -1
        b_ready = self.next_arrival(b, now)
        f_ready = self.next_arrival(rank, now) if f >= 0 else inf
        if self.recomputes and self.needs_r(rank):
            # R is the first part of B, but need not wait for the gradient.
            b_ready -= self.duration[r]
            if self.held[rank] + self.allocation[r] > self.limits[rank]:
                if b_ready <= now:
                    return (weights[0], now) if weights else (-1, inf)
            elif b_ready <= now or now + self.duration[r] <= f_ready:
                return r, now
        elif b_ready <= now:
            return b, now
        ready = min(b_ready, f_ready)
        if f_ready <= now:
            if self.fills(rank, now, b_ready, self.duration[f], self.policy.forwards):
                return f, now
            ready = b_ready
        if weights and self.fills(rank, now, ready, self.duration[weights[0]], self.policy.weights):
            return weights[0], now
        return -1, ready

    def will_keep(self, rank: int, code: int) -> bool:
        """Whether the F `code` keeps its activations, if they fit: where its B follows at once, R is no use."""
        size = self.num_stages
        return (code == size - 1 and self.done[code] == self.done[code + size]) or super().will_keep(rank, code)
