"""Plans with pairs: a rank runs a forward and a backward as one operation if both are ready or will soon be ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappush
from itertools import islice, product
from math import inf

from megatron.zero_bubble.planner.event_loop import EventLoop
from megatron.zero_bubble.planner.orders import schedule_of_orders
from megatron.zero_bubble.planner.portfolio import best_of, fits
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.rules import GapRule
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.generators.dualpipe_v import dualpipe_v
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_pairs
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.pairs import computations


@dataclass(frozen=True)
class PairPolicy:
    """The parameters of a scheduling policy that runs a pair whenever a forward and a backward are ready."""

    caps: tuple[int, ...]
    """Rank -> limit on microbatches in flight, summed over chunks; at this limit the rank runs F only in pairs."""
    patience: float = 1.0
    """Longest time for which a ready F or B waits until it can run in a pair, as a multiple of the duration of a B."""
    weights: GapRule = GapRule.BALANCED
    """Whether a W may run in an idle gap that is shorter than the W."""
    fuses: bool = False
    """Whether W runs inside a pair if W takes less time in the pair than as a separate operation."""


FEW = 4
"""Smallest number of scheduling policies that are tried, for a problem of any size."""


def with_pairs(name: str, problem: Problem, apart: Schedule) -> Schedule:
    """The fastest schedule that fits in memory, either `apart` or a schedule with pairs of a forward and a backward.

    Args:
        name: name of the returned schedule.
        problem: a problem whose costs include the exchanges of tokens between experts. With a group size, the schedule
            with pairs has megatron-core's order of forwards or the order of forwards in `apart`.
        apart: the schedule planned without pairs, within the memory limits of the problem.
    """
    # Policies choose the order of forwards, which a group size fixes.
    number = max(FEW, problem.budget // problem.num_ops) if problem.group_size is None else 0
    planned = (_PairedRanks(problem, policy).schedule() for policy in islice(_policies(problem), number))
    named = list(_named(problem))
    orders = [_computations(schedule) for schedule in named]
    orders += [_neighbours_paired(_computations(apart), first) for first in (OpKind.F, OpKind.B)]
    rules = product((GapRule.ALWAYS, GapRule.BALANCED), _may_fuse(problem))
    policies = [PairPolicy((), weights=weights, fuses=fuses) for weights, fuses in rules]
    ordered = (_OrderedRanks(problem, policy, order).schedule() for order in orders for policy in policies)
    candidates = [apart, *filter(None, planned), *filter(None, ordered), *named]
    return replace(best_of([each for each in candidates if each is apart or fits(each, problem)], problem), name=name)


def _policies(problem: Problem) -> Iterator[PairPolicy]:
    """Yield the scheduling policies to try, as combinations of the fields of `PairPolicy`, the most promising first."""
    p, v = problem.num_ranks, problem.placement.num_chunks
    before = p * (v - 1) if problem.placement.kind == "interleaved" else 0
    unlimited = (problem.num_microbatches * v,) * p
    caps = [tuple(before + slope * (p - 1 - r) + more for r in range(p)) for slope, more in ((2, 2), (1, 1), (0, p))]
    for cap, patience, weights, fuses in product(
        [unlimited, *caps], (1.0, 0.5, 0.0), (GapRule.BALANCED, GapRule.ALWAYS), _may_fuse(problem)
    ):
        yield PairPolicy(cap, patience, weights, fuses)


def _may_fuse(problem: Problem) -> tuple[bool, ...]:
    """The values of `PairPolicy.fuses` to try: True only if a W takes less time inside some pair than separately."""
    hides = any(_hides_weights(problem, *pair) for stages in problem.stages_of for pair in product(stages, repeat=2))
    return (False, True)[: 1 + hides]


def _hides_weights(problem: Problem, forward: int, backward: int) -> bool:
    """Whether the W of stage `backward` takes less time in a pair with the F of stage `forward` than separately."""
    costs = problem.costs
    added = costs.time_of_pair(forward, OpKind.PBW, backward) - costs.time_of_pair(forward, OpKind.PB, backward)
    return added < costs.time_w[backward] * (1 - 1e-9)


Computations = list[list[tuple[Op, ...]]]
"""Rank -> its computations in order: (forward,), (backward,) or, for a pair, (forward, backward)."""


def _computations(schedule: Schedule) -> Computations:
    """The forwards, backwards and pairs of a schedule, without W."""
    return [
        [
            tuple(op if op.kind is OpKind.F else op._replace(kind=OpKind.B) for op in together)
            for together in computations(lane)
            if together[0].kind is not OpKind.W
        ]
        for lane in schedule.ops
    ]


def _neighbours_paired(lanes: Computations, first: OpKind) -> Computations:
    """Pair each operation of the kind `first` with the next operation, if the two differ in kind and in microbatch."""
    paired: Computations = []
    for lane in lanes:
        ops = [op for together in lane for op in together]
        operations: list[tuple[Op, ...]] = []
        for op in ops:
            before = operations[-1] if operations else ()
            fits_before = len(before) == 1 and before[0].kind is first and before[0].microbatch != op.microbatch
            if fits_before and op.kind is not first:
                operations[-1] = (op, *before) if op.kind is OpKind.F else (*before, op)
            else:
                operations.append((op,))
        paired.append(operations)
    return paired


def _named(problem: Problem) -> Iterator[Schedule]:
    """Yield DualPipe-V for a V-shaped placement, or interleaved 1F1B with pairs for an interleaved placement."""
    p, m, placement = problem.num_ranks, problem.num_microbatches, problem.placement
    try:
        if placement.kind == "v" and placement.num_chunks == 2:
            yield dualpipe_v(p, m)
        elif placement.kind == "interleaved":
            yield interleaved_pairs(p, m, num_chunks=placement.num_chunks, group_size=problem.group_size)
    except ScheduleError:
        return


class _PairedRanks(EventLoop):
    """A scheduling policy that runs pairs. A pair has the code `codes.end + stage of F * num_stages + stage of B`."""

    def __init__(self, problem: Problem, policy: PairPolicy) -> None:
        super().__init__(problem)
        self.policy = policy
        self.paired: list[dict[Op, OpKind]] = [{} for _ in range(problem.num_ranks)]
        """Rank -> {B that runs in a pair: kind of the pair}."""

    def schedule(self) -> Schedule | None:
        """Run the event loop and return the resulting schedule with pairs; None if the ranks deadlock."""
        plan = self.run()
        if plan is None:
            return None

        def kinds(rank: int, op: Op) -> tuple[OpKind, ...]:
            paired = self.paired[rank]
            is_fused = op.kind is OpKind.W and paired.get(op._replace(kind=OpKind.B)) is OpKind.PBW
            return () if is_fused else (paired.get(op, op.kind),)

        return schedule_of_orders(self.problem, plan.orders).with_kinds(kinds)

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        codes, policy, weights = self.codes, self.policy, self.weights[rank]
        stages = self.problem.stages_of[rank]
        in_flight = sum(self.done[s] - self.done[codes.b + s] for s in stages)
        f, f_ready = self._first(stages[::-1], now, codes.f)
        b, b_ready = self._first(stages, now, codes.b)
        if f >= 0 and self.memory[rank] + self.allocation[f] > self.limits[rank]:
            if f_ready <= now and weights:
                return weights[0], now
            f, f_ready = -1, inf
        if f >= 0 and b >= 0 and f_ready <= now and b_ready <= now:
            return self.pair_of(f, b), now
        patience = policy.patience * self.duration[codes.b + stages[0]]
        if b >= 0 and b_ready <= now and f_ready > now + patience:
            return b, now
        if f >= 0 and f_ready <= now and b_ready > now + patience and in_flight < policy.caps[rank]:
            return f, now
        if in_flight >= policy.caps[rank] and b_ready == inf:
            f_ready = inf
        ready = max(f_ready, b_ready) if max(f_ready, b_ready) < inf else min(f_ready, b_ready)
        if weights and self.fills(rank, now, max(now, ready), self.duration[weights[0]], policy.weights):
            return weights[0], now
        return -1, ready if ready > now else inf

    def pair_of(self, f: int, b: int) -> int:
        """The code of the pair of an F and a B."""
        return self.codes.end + f * self.num_stages + b - self.codes.b

    def parts_of(self, code: int) -> tuple[int, ...]:
        """The codes of the F and the B if `code` is the code of a pair; otherwise a tuple with `code` only."""
        forward, backward = divmod(code - self.codes.end, self.num_stages)
        return (code,) if code < self.codes.end else (forward, self.codes.b + backward)

    def _first(self, stages: tuple[int, ...], now: float, first: int) -> tuple[int, float]:
        """(code, start time) of the earliest operation of one kind, on the first of `stages` that can start it then.

        The kind is given by its `first` code (see `Codes`); (-1, inf) if no start time is known.
        """
        ready = [(self.next_arrival(first + s, now), place) for place, s in enumerate(stages)]
        when, place = min(ready)
        return (first + stages[place], when) if when < inf else (-1, inf)

    def start(self, code: int, rank: int, now: float, events: list[tuple[float, int]]) -> None:
        if code < self.codes.end:
            super().start(code, rank, now, events)
            return
        codes, problem = self.codes, self.problem
        forward, b = self.parts_of(code)
        backward = b - codes.b
        # A stage computes weight gradients in microbatch order.
        in_order = self.done[codes.w + backward] == self.done[b]
        fuses = self.policy.fuses and in_order and _hides_weights(problem, forward, backward)
        kind = OpKind.PBW if fuses else OpKind.PB
        time = problem.costs.time_of_pair(forward, kind, backward)
        self.paired[rank][Op(OpKind.B, self.done[b], problem.placement.chunk_of(backward))] = kind
        if not self.has_started[rank]:
            self.has_started[rank], self.span_start[rank] = True, now - self.worked[rank]
        self.orders[rank] += [forward, b]
        self.end[rank] = self.free[rank] = end = now + time
        self.worked[rank] += time
        self.memory[rank] += self.allocation[forward] + self.allocation[b]
        heappush(events, (end, rank))
        self.note_results(forward, rank, end, events)
        self.note_results(b, rank, end, events)
        weight = codes.w + backward
        self.offer_weight(weight, rank)
        if fuses:
            self.orders[rank].append(weight)
            self.memory[rank] += self.allocation[weight]
            self.done[weight] += 1
            self.remove_weight(weight, rank)


class _OrderedRanks(_PairedRanks):
    """A scheduling policy that runs F, B and F-B pairs in a given order, and W in idle gaps or when memory is full."""

    def __init__(self, problem: Problem, policy: PairPolicy, order: Computations) -> None:
        super().__init__(problem, policy)
        self._queues = [[self._code(rank, each) for each in reversed(lane)] for rank, lane in enumerate(order)]
        """Rank -> codes of the computations that have not run, in reverse order."""

    def _code(self, rank: int, together: tuple[Op, ...]) -> int:
        stages = self.problem.stages_of[rank]
        codes = [stages[op.chunk] + self.codes.b * (op.kind is OpKind.B) for op in together]
        return self.pair_of(*codes) if len(codes) == 2 else codes[0]

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        weights, queue = self.weights[rank], self._queues[rank]
        if not queue:
            return (weights[0], now) if weights else (-1, inf)
        first, *_ = parts = self.parts_of(queue[-1])
        ready = max(self.next_arrival(part, now) for part in parts)
        is_full = first < self.codes.b and self.memory[rank] + self.allocation[first] > self.limits[rank]
        if weights:
            fills = ready > now and self.fills(rank, now, ready, self.duration[weights[0]], self.policy.weights)
            if is_full or fills:
                return weights[0], now
        return (queue.pop(), now) if ready <= now else (-1, ready)
