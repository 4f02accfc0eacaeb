"""Extends a schedule with copies of activations to the host and back, to keep every rank within its memory limit."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, inf
from typing import NamedTuple

from megatron.zero_bubble.planner.expected_time import slowdown
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import Limits, tolerance
from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.host_link import without_copies
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import BACKWARDS, COPIES, OpKind
from megatron.zero_bubble.schedule.memory import memory_held, peak_memory
from megatron.zero_bubble.schedule.timeline import TimedOp, Timeline

_STEP = 2**0.5
"""Factor between the successive memory limits under which schedules without copies to the host are planned."""
_MOST_LIMITS = 5
"""Largest number of memory limits, above the problem's limit, under which schedules without copies are planned."""
_ROUNDS = 3
"""Largest number of rounds of placing copies; each round uses the simulated times of the previous round's schedule."""
_NEAR = 1.05
"""Copies are placed again if the schedule takes at most `_NEAR` times as long as the fastest schedule so far."""

_LEAST_RULES = 3
"""Smallest number of rules (see `CopyRule`) that are tried, for a schedule of any size."""
_WEIGHT = 4
"""Number of operations that can be simulated in the time in which one operation is planned."""

_Key = tuple[int, int]
"""(microbatch, chunk)"""


class CopyRule(NamedTuple):
    """A rule that decides when copies of activations are queued on the link between device and host."""

    lead: float
    """Time between queuing a copy to the device and the start of the backward, divided by the copy's duration."""
    patience: float
    """Longest wait for queued copies at which an F queues its copy to the host, divided by the copy's duration."""
    weights_first: bool = False
    """Whether a rank that lacks memory first runs W early, and waits for copies only if W release too little memory."""
    assumed: float = 1.0
    """Assumed duration of a copy divided by its real duration. With a value below 1, ranks may wait for copies."""


RULES = tuple(CopyRule(*each) for each in product((1.0, 1.5, 2.5), (0.25, 1.0, 2.0), (False, True)))
_ASSUMED = (0.95, 0.9, 0.8, 0.7)
"""Values of `CopyRule.assumed` that are tried with the best of `RULES`."""


class _Copied(NamedTuple):
    """The fastest schedule with copies to the host that the search has found so far."""

    time: float
    """Expected time of the schedule; before a schedule is found, the time of the best schedule without copies."""
    schedule: Schedule | None = None
    uncopied: tuple[Timeline, float] | None = None
    """Simulation of the schedule into which copies were inserted, and that schedule's `slowdown`."""
    rule: CopyRule = RULES[0]
    """The rule that inserted the copies."""


def offloaded(
    plans: Callable[[Limits], Iterator[Schedule]], problem: Problem, shortest: float = inf
) -> Schedule | None:
    """Search for a schedule that fits in the memory limits of a problem by copying activations to the host.

    Schedules without copies are planned under memory limits above the limits of the problem. Copies are inserted into
    each planned schedule, so that the schedule fits in the limits of the problem. A plan for a larger memory limit
    needs more copies, but has less idle time and less recomputation. The function returns the schedule with the
    shortest expected time.

    Args:
        plans: function that plans schedules without copies under given memory limits.
        problem: the planning problem; the returned schedule fits in its memory limits.
        shortest: time of the best schedule without copies.

    Returns:
        The fastest schedule with copies; None if no schedule with copies takes less time than `shortest`.
    """
    if not any(problem.costs.memory_d):
        return None
    best, limits = _Copied(shortest), problem.limits
    num_rules = max(_LEAST_RULES, _WEIGHT * problem.budget // (problem.num_ops * _ROUNDS * _MOST_LIMITS))
    rules = RULES[:: ceil(len(RULES) / num_rules)]
    for _ in range(_MOST_LIMITS):
        limits = tuple(limit * _STEP for limit in limits)
        is_last = False
        for schedule in plans(limits):
            timeline = problem.simulated(schedule.without_communication())
            uncopied = timeline, slowdown(timeline, problem.spread, problem.time_between)
            best = _faster(best, uncopied, rules, problem)
            peaks = peak_memory(schedule, problem.costs)
            # If no rank of a plan exceeds the previous, smaller limit, a larger limit gives the same plan. A plan that
            # keeps the limits of the problem is an exception, because such a plan is slow.
            is_last = all(peak < limit / _STEP for peak, limit in zip(peaks, limits, strict=True)) and any(
                peak > limit for peak, limit in zip(peaks, problem.limits, strict=True)
            )
        if is_last:
            break
    if best.uncopied is not None:
        best = _faster(best, best.uncopied, [best.rule._replace(assumed=assumed) for assumed in _ASSUMED], problem)
    return best.schedule


def _faster(best: _Copied, uncopied: tuple[Timeline, float], rules: Iterable[CopyRule], problem: Problem) -> _Copied:
    """Insert copies into `uncopied` by each rule; return the fastest schedule, or `best` if `best` is faster."""
    for rule in rules:
        timed, factor = uncopied
        for _ in range(_ROUNDS):
            placed = with_copies(timed, problem, rule)
            if placed is None:
                break
            timed = problem.simulated(placed)
            time, _ = problem.judged(factor * timed.cost, factor * timed.makespan)
            if time < best.time * (1 - 1e-9):
                best = _Copied(time, timed.schedule, uncopied, rule)
            elif time > best.time * _NEAR:
                break
    return best


def with_copies(timed: Timeline, problem: Problem, rule: CopyRule) -> Schedule | None:
    """Insert copies to the host and back, so that a schedule fits in the memory limits of a problem.

    A rank with full memory releases activations that have been copied to the host, and starts with the activations that
    the rank needs last (Belady's rule for page replacement). A copy back to the device is queued in time for the
    backward, or later if memory is full. If copies do not release enough memory, some W run earlier.

    Args:
        timed: a simulation of the schedule; its times determine where copies are placed. Copies that the schedule
            already has are removed first.
        problem: the planning problem, with the memory limits and the costs of the stages.
        rule: rule that decides when copies are queued on the link between device and host.

    Returns:
        The schedule with copies; None if the schedule exceeds a memory limit even with copies.
    """
    lanes = [_with_weights_in_gaps([timed for timed in lane if timed.op.kind not in COPIES]) for lane in timed.lanes]
    schedule = replace(without_copies(timed.schedule), ops=tuple(tuple(timed.op for timed in lane) for lane in lanes))
    ranks = []
    for rank, lane in enumerate(lanes):
        ops = _RankCopies(schedule, problem, rank, lane, rule).ops()
        if ops is None:
            return None
        ranks.append(ops)
    return replace(schedule, ops=tuple(ranks))


def _with_weights_in_gaps(lane: Sequence[TimedOp]) -> list[TimedOp]:
    """Move W earlier into idle gaps at least as long as the W, such as the gap in which a rank waits for a copy."""
    waiting: dict[int, deque[TimedOp]] = {}
    for timed in lane:
        if timed.op.kind is OpKind.W:
            waiting.setdefault(timed.op.chunk, deque()).append(timed)
    moved, done, filled, free = set[Op](), set[_Key](), list[TimedOp](), inf
    for timed in lane:
        op, start, end = timed
        if op in moved:
            continue
        while True:
            able = [each[0] for each in waiting.values() if each and each[0].op[1:] in done and each[0].op != op]
            first = min(able, key=lambda each: each.start, default=None)
            if first is None or first.end - first.start > (start - free) * (1 + 1e-9):
                break
            waiting[first.op.chunk].popleft()
            moved.add(first.op)
            filled.append(TimedOp(first.op, free, free := free + first.end - first.start))
        if op.kind is OpKind.W:
            waiting[op.chunk].popleft()
        elif op.kind in BACKWARDS:
            done.add(op[1:])
        filled.append(timed)
        free = end
    return filled


class _Activations(NamedTuple):
    """Activations of a microbatch and chunk that are on the device and may be released."""

    backward: int
    """Position of the backward that needs the activations."""
    copy_end: float
    """Estimated time at which the copy of the activations to the host ends; inf if no copy is queued."""
    key: _Key


class _RankCopies:
    """Extends the order of one rank with copies of activations to the host and back."""

    def __init__(
        self, schedule: Schedule, problem: Problem, rank: int, lane: Sequence[TimedOp], rule: CopyRule
    ) -> None:
        stages, costs = problem.placement.stages_of(rank), in_groups(problem.costs, schedule.groups)
        self._lane, self._limit = lane, problem.limits[rank] + tolerance(problem.limits[rank])
        self._rule = rule
        self._size = [costs.memory_d[stage] for stage in stages]
        self._out = [rule.assumed * costs.time_d[stage] for stage in stages]
        self._back = [rule.assumed * costs.time_h[stage] for stage in stages]
        self._starts = [timed.start for timed in lane]
        self._backward = {timed.op[1:]: k for k, timed in enumerate(lane) if timed.op.kind in BACKWARDS}
        fixed = {timed.op[1:] for timed in lane if timed.op.kind is OpKind.R}
        self._movable = {key for key in self._backward if key not in fixed and self._size[key[1]] > 0}
        held = [after for _, _, after in memory_held(schedule, problem.costs, rank)]
        self._changes = [after - before for before, after in zip([0, *held[:-1]], held, strict=True)]
        self._weights = [k for k, timed in enumerate(lane) if timed.op.kind is OpKind.W]
        """Positions of the W that have not yet run."""
        self._early: set[int] = set()
        """Positions, in the original order of the rank, of all W that have been moved to an earlier place."""
        self._largest = max(self._changes, default=0)
        self._releasable: list[_Activations] = []
        self._due: list[tuple[int, _Key]] = []
        """`(position, (microbatch, chunk))` for each released activation; its copy back is queued before `position`."""
        self._link: float = 0
        """Time at which the host link has finished all queued copies."""
        self._memory: float = 0
        self._placed: list[Op] = []

    def ops(self) -> tuple[Op, ...] | None:
        """Return the operations of the rank with copies; None if the rank exceeds its memory limit even with copies."""
        for k, ((op, _, end), change) in enumerate(zip(self._lane, self._changes, strict=True)):
            if k in self._early:
                continue
            if not self._bring_back(k) or (change > 0 and not self._make_room(change, k)):
                return None
            self._placed.append(op)
            if op.kind is OpKind.W:
                self._weights.remove(k)
            self._memory += change
            if op.kind is OpKind.F and op[1:] in self._movable:
                self._keep(op[1:], end)
        return tuple(self._placed)

    def _keep(self, key: _Key, end: float) -> None:
        """Record the activations of an F, and queue their copy to the host if few copies are already queued."""
        time, copy_end = self._out[key[1]], inf
        if self._link - end <= self._rule.patience * time:
            copy_end = self._link = max(self._link, end) + time
        self._releasable.append(_Activations(self._backward[key], copy_end, key))

    def _make_room(self, amount: float, at: int, last: int | None = None) -> bool:
        """Free memory before the operation at position `at`; return False if `amount` still does not fit.

        Only activations with a backward after the position `last` (by default `at`) may be released.
        """
        if self._memory + amount <= self._limit:
            return True
        now, last = self._starts[at], at if last is None else last
        self._releasable = [each for each in self._releasable if each.backward > at]
        candidates = sorted((each for each in self._releasable if each.backward > last), key=lambda each: each.backward)
        weights = self._next_weights(at)
        missing = self._memory + amount - self._limit
        possible = sum(self._size[each.key[1]] for each in candidates) - sum(self._changes[k] for k in weights)
        if missing > possible:
            return False
        copied = [each for each in candidates if each.copy_end <= now]
        others = sorted((each for each in candidates if each.copy_end > now), key=lambda each: -each.copy_end)
        while self._memory + amount > self._limit:
            if copied:
                self._release(copied.pop(), at)
            elif weights and (self._rule.weights_first or not others):
                self._run_early(weights.pop(0))
            else:
                self._release(others.pop(), at)
        return True

    def _next_weights(self, at: int) -> list[int]:
        """Positions, in order, of the W that release memory and may run before the operation at position `at`."""
        candidates, blocked = [], set[int]()
        for k in self._weights:
            op = self._lane[k].op
            if k <= at or self._backward[op[1:]] >= at or self._changes[k] >= 0:
                blocked.add(op.chunk)
                if len(blocked) == len(self._size):
                    break
            if op.chunk not in blocked:
                candidates.append(k)
        return candidates

    def _run_early(self, position: int) -> None:
        self._early.add(position)
        self._weights.remove(position)
        self._placed.append(self._lane[position].op)
        self._memory += self._changes[position]

    def _release(self, activations: _Activations, at: int) -> None:
        self._releasable.remove(activations)
        backward, copy_end, key = activations
        if copy_end == inf:
            self._link = max(self._link, self._starts[at]) + self._out[key[1]]
        self._placed.append(Op(OpKind.D, *key))
        self._memory -= self._size[key[1]]
        start = self._starts[backward] - self._rule.lead * self._back[key[1]]
        self._due.append((max(at + 1, min(backward, bisect_right(self._starts, start) - 1)), key))

    def _bring_back(self, at: int) -> bool:
        """Queue the copies to the device that are planned up to position `at`; return False if memory is too small."""
        due = sorted((self._backward[key], key) for k, key in self._due if k <= at) if self._due else []
        for backward, key in due:
            size = self._size[key[1]]
            # Activations cannot be released twice. An early copy back must therefore leave enough memory for a forward.
            if self._make_room(size + self._largest * (backward > at), at, backward):
                self._placed.append(Op(OpKind.H, *key))
                self._memory += size
                self._link = max(self._link, self._starts[at]) + self._back[key[1]]
                self._due = [each for each in self._due if each[1] != key]
            elif backward <= at:
                return False
        return True
