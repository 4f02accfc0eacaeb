"""Runs what nobody waits for in the gaps of an order: W, and the weight gradients of vocabulary shards."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.graph import Arrival, Node, nodes_of, sources
from megatron.zero_bubble.schedule.ir import Op, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.memory import memory_held

WEIGHT_GRADIENTS = (OpKind.W, OpKind.T, OpKind.EW)
"""What nobody waits for: its place in the order is free."""


def fill_gaps(schedule: Schedule, costs: StageCosts, limits: Sequence[float], overhang: float) -> Schedule | None:
    """The same schedule, without communication, with all W, T and EW where its other operations leave gaps.

    One fills a gap if no more than the part `overhang` of it is longer than the gap, or where the rank otherwise lacks
    the memory for its next operation. None if a rank cannot stay within its limit, with this order of the others.
    """
    return _Gaps(schedule, costs, limits, overhang).run()


class _Need(NamedTuple):
    """A result that all operations of one kind in one stage need, as `Need` says."""

    result: OpKind
    stage: int
    num_before: int
    makers: frozenset[int] | None
    """The microbatches that have it; None if all have."""
    way: float
    """How long it is on its way."""


class _Gaps:
    """Runs the ranks by events; an event is a time at which a rank looks for something to do."""

    def __init__(self, schedule: Schedule, costs: StageCosts, limits: Sequence[float], overhang: float) -> None:
        self.schedule, self.costs, self.overhang = schedule, costs, overhang
        self.times = costs.times()
        self.allocation = [dict(_allocations(schedule, costs, rank)) for rank in range(schedule.num_ranks)]
        self.limits = [limit * (1 + 1e-9) for limit in limits]
        self.waited_for: list[deque[Op]] = []
        """Rank -> the operations that others wait for, in the given order."""
        self.free: list[list[deque[Op]]] = []
        """Rank -> its weight gradients, those of one kind and chunk in microbatch order."""
        for ops in schedule.ops:
            queues: defaultdict[tuple[OpKind, int], deque[Op]] = defaultdict(deque)
            for op in ops:
                if op.kind in WEIGHT_GRADIENTS:
                    queues[op.kind, op.chunk].append(op)
            self.waited_for.append(deque(op for op in ops if op.kind not in WEIGHT_GRADIENTS))
            self.free.append(list(queues.values()))
        self.needs: list[dict[tuple[OpKind, int], list[_Need]]] = [{} for _ in schedule.ops]
        """Rank, kind and chunk -> what such an operation needs."""
        self.ends: dict[Node, float] = {}
        self.waiting: defaultdict[Node, set[int]] = defaultdict(set)
        self.busy_until = [0.0] * schedule.num_ranks
        self.held = [0.0] * schedule.num_ranks
        self.done: list[list[Op]] = [[] for _ in schedule.ops]
        self.events = [(0.0, rank) for rank in range(schedule.num_ranks)]

    def run(self) -> Schedule | None:
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.busy_until[rank]:
                self._look_for_work(rank, now)
        if any(map(len, self.waited_for)) or any(queue for queues in self.free for queue in queues):
            return None
        return replace(self.schedule, ops=tuple(map(tuple, self.done)))

    def _look_for_work(self, rank: int, now: float) -> None:
        small = 1e-9 * (1 + now)
        ready = inf
        if self.waited_for[rank]:
            op = self.waited_for[rank][0]
            if self.held[rank] + self.allocation[rank][op] <= self.limits[rank]:
                ready = self._ready(rank, op)
            if ready <= now + small:
                self.waited_for[rank].popleft()
                self._start(rank, op, now)
                return
        possible = []
        later = ready
        for queue in self.free[rank]:
            if queue:
                there = self._ready(rank, queue[0])
                if there > now + small:
                    later = min(later, there)
                elif self._time(rank, queue[0]) * (1 - self.overhang) <= ready - now + small:
                    possible.append((there, queue[0].microbatch, queue))
        if possible:
            *_, queue = min(possible, key=lambda each: each[:2])
            self._start(rank, queue.popleft(), now)
        elif later < inf:
            heappush(self.events, (later, rank))

    def _ready(self, rank: int, op: Op) -> float:
        """When all that `op` needs is there; if that is not known yet, infinity, and the rank is woken when it is."""
        kind, microbatch, chunk = op
        needs = self.needs[rank].get((kind, chunk))
        if needs is None:
            needs = self.needs[rank][kind, chunk] = list(self._needs_of(rank, kind, chunk))
        ready = 0.0
        for result, stage, num_before, makers, way in needs:
            needed = microbatch - num_before
            if needed < 0 or (makers is not None and needed not in makers):
                continue
            node = result, stage, needed
            end = self.ends.get(node)
            if end is None:
                self.waiting[node].add(rank)
                return inf
            if end + way > ready:
                ready = end + way
        return ready

    def _needs_of(self, rank: int, kind: OpKind, chunk: int) -> Iterator[_Need]:
        placement = self.schedule.placement
        for need, stage, is_remote, edge in sources(placement, kind, placement.stage_of(rank, chunk)):
            way = Arrival((need.result, stage, 0), edge).time(self.costs) if is_remote else 0
            makers = None
            if need.is_optional:
                ops = self.schedule.ops[placement.rank_of(stage)]
                made = (need.result, placement.chunk_of(stage))
                makers = frozenset(op.microbatch for op in ops if (op.kind, op.chunk) == made)
            yield _Need(need.result, stage, need.num_before, makers, way)

    def _start(self, rank: int, op: Op, now: float) -> None:
        self.done[rank].append(op)
        self.held[rank] += self.allocation[rank][op]
        end = self.busy_until[rank] = now + self._time(rank, op)
        heappush(self.events, (end, rank))
        for node in nodes_of(self.schedule.placement, rank, op):
            self.ends[node] = end
            for other in self.waiting.pop(node, ()):
                heappush(self.events, (now, other))

    def _time(self, rank: int, op: Op) -> float:
        return self.times[op.kind][self.schedule.placement.stage_of(rank, op.chunk)]


def _allocations(schedule: Schedule, costs: StageCosts, rank: int) -> Iterator[tuple[Op, float]]:
    """Yield every operation of `rank` with its change of memory."""
    before: float = 0
    for op, _, after in memory_held(schedule, costs, rank):
        yield op, after - before
        before = after
