"""No order given: every rank decides when it is free, by a few rules."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megatron.zero_bubble.schedule.search.clock import Clock, Plan
from megatron.zero_bubble.schedule.search.fill import GapRule
from megatron.zero_bubble.schedule.search.problem import Problem


@dataclass(frozen=True)
class Policy:
    """How a rank decides. B comes before F, and W fills gaps, unless told otherwise."""

    weights: GapRule = GapRule.BALANCED
    """Whether W fills a gap that is too short for it."""
    forwards: GapRule = GapRule.ALWAYS
    """Whether F fills a gap that is too short for it."""
    caps: tuple[int, ...] | None = None
    """Stage -> how many microbatches may be between the start of F and the end of B; None: what memory allows."""
    alternate: bool = False
    """Whether a rank waits for an F after a B, and for a B after an F, once its first B has come."""
    other_chunk: bool = False
    """Whether F goes to the chunk that did not run the last F, even if it waits; else to the last that is ready."""
    oldest: bool = False
    """Whether the B of the oldest microbatch goes first; otherwise that of the last chunk."""


def list_schedule(problem: Problem, policy: Policy, target: float = 0) -> Plan | None:
    """The plan that `policy` leads to. `target` is a span that `BALANCED` does not try to get below.

    An F starts only if the rank keeps room for one microbatch in each of its later chunks: the oldest
    microbatch can then always go on, and no limit that works for one microbatch at a time leads to a deadlock.
    None only in corner cases: caps that leave ranks waiting, or a W that does not release all memory.
    """
    return _Greedy(problem, policy, target).run()


class _Greedy(Clock):
    def __init__(self, problem: Problem, policy: Policy, target: float) -> None:
        super().__init__(problem, target)
        size = problem.num_stages
        self.policy = policy
        self.caps = policy.caps or (self.num_microbatches,) * size
        self.last_f = [-1] * problem.num_ranks
        self.after_f = [True] * problem.num_ranks
        """Whether the last operation but W was an F."""
        self.held_by = [0.0] * size
        self.later = [[s for s in problem.stages_of[problem.rank_of[stage]] if s >= stage] for stage in range(size)]
        """Stage -> itself and the later stages of its rank."""
        whole = problem.allocation
        self.reserve = [sum(whole[s] for s in self.later[stage][1:]) for stage in range(size)]

    def start(self, code: int, rank: int, now: float, events: list[tuple[float, int]]) -> None:
        size = self.num_stages
        self.held_by[code % size] += self.allocation[code]
        if code < size:
            self.last_f[rank] = code
            self.after_f[rank] = True
        elif code < 2 * size:
            self.after_f[rank] = False
        super().start(code, rank, now, events)

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        b_ready, b = self.next_backward(rank, now)
        f_ready, f, blocked = self.next_forward(rank, now)
        w = self.next_weight(rank)
        code, ready = (b, b_ready) if b_ready <= now or b_ready <= f_ready else (f, f_ready)
        if self.policy.alternate and self.in_steady_state(rank):
            if self.after_f[rank]:
                code, ready = (b, b_ready) if b >= 0 else (f, f_ready)
            elif f >= 0:
                code, ready = f, f_ready
            elif blocked and w >= 0:
                return w, now
        if code >= 0 and ready <= now:
            if code != f or b_ready <= now or self.may_delay(rank, now, b_ready, f, self.policy.forwards):
                return code, now
            ready = b_ready
        if w >= 0 and self.may_delay(rank, now, ready, w, self.policy.weights):
            return w, now
        if w >= 0 and blocked and code != f and ready > now + self.duration[w]:
            return w, now
        return -1, ready

    def in_steady_state(self, rank: int) -> bool:
        """Whether `rank` has run a B, and still has F to run."""
        stages = self.problem.stages_of[rank]
        size = self.num_stages
        return self.done[size + stages[-1]] > 0 and any(self.done[s] < self.num_microbatches for s in stages)

    def may_delay(self, rank: int, now: float, ready: float, code: int, rule: GapRule) -> bool:
        """Whether `code` goes before the operation that is ready at `ready`."""
        if now + self.duration[code] <= ready + 2 * self.epsilon or rule is GapRule.ALWAYS:
            return True
        return rule is GapRule.BALANCED and self.span_so_far(rank, ready) > self.target + self.epsilon

    def next_backward(self, rank: int, now: float) -> tuple[float, int]:
        """(when it is ready, code) of the B that comes first; of several that are ready, as the policy says."""
        size = self.num_stages
        best_ready, best, best_age = inf, -1, 0
        for stage in reversed(self.problem.stages_of[rank]):
            code = size + stage
            age = self.done[code]
            arrivals = self.arrivals[code]
            if age < len(arrivals):
                ready = max(now, arrivals[age])
                older = self.policy.oldest and ready == best_ready and age < best_age
                if ready < best_ready or older:
                    best_ready, best, best_age = ready, code, age
        return best_ready, best

    def next_forward(self, rank: int, now: float) -> tuple[float, int, bool]:
        """(when it is ready, code) of the first F, and whether memory or a cap holds back one that is ready."""
        best_ready, best, blocked = inf, -1, False
        for stage in reversed(self.problem.stages_of[rank]):
            count = self.done[stage]
            arrivals = self.arrivals[stage]
            if count >= len(arrivals):
                continue
            ready = max(now, arrivals[count])
            if not self.has_room(stage, rank):
                blocked = blocked or ready <= now
                continue
            if self.policy.other_chunk and stage != self.last_f[rank]:
                return ready, stage, blocked
            if ready < best_ready:
                best_ready, best = ready, stage
        return best_ready, best, blocked

    def has_room(self, stage: int, rank: int) -> bool:
        """Whether F of `stage` fits, and leaves room for one microbatch in each later chunk of the rank."""
        if self.done[stage] - self.done[self.num_stages + stage] >= self.caps[stage]:
            return False
        size = self.allocation[stage]
        limit = self.limits[rank]
        if len(self.later[stage]) == 1:
            return self.held[rank] + size <= limit
        later_held = sum(self.held_by[s] for s in self.later[stage][1:])
        held = self.held[rank] - later_held
        for s in self.later[stage]:
            if s != stage:
                held += self.held_by[s]
            if held + size + self.reserve[s] > limit:
                return False
        return True

    def next_weight(self, rank: int) -> int:
        """The code of the W to run next, the first chunk's first; -1 if none is due."""
        size = self.num_stages
        for stage in self.problem.stages_of[rank]:
            if self.done[2 * size + stage] < self.done[size + stage]:
                return 2 * size + stage
        return -1
