"""Start times of the operations in complete orders of all ranks, and the critical paths through these operations."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from typing import NamedTuple

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.event_loop import PlannedOrders
from megatron.zero_bubble.planner.problem import Problem


class Stretch(NamedTuple):
    """Part of the critical path: the operations at positions `first` to `last`, which `rank` runs without idle time."""

    rank: int
    first: int
    last: int


class OrderGraph:
    """A graph of the operations in complete orders of all ranks, with the longest path through every operation.

    The operation of microbatch k with code c has the number `c * num_microbatches + k`. An F has the same number
    whether it drops or keeps its activations.
    """

    def __init__(self, problem: Problem, orders: Sequence[Order]) -> None:
        m = problem.num_microbatches
        self.codes = codes = problem.codes
        self.problem = problem
        self.num_microbatches = m
        end = codes.end if problem.has_shards else codes.drop
        self.duration, self.latency, self.allocation = (
            [value for value in of_codes[:end] for _ in range(m)]
            for of_codes in (problem.duration, problem.latency, problem.allocation)
        )
        self.rank_of = [rank for rank in problem.ranks[:end] for _ in range(m)]
        self.dropped: set[int] = set()
        """The F that drop their activations, each as its number (see `OrderGraph`)."""
        self.needs, self.users = _dependencies(problem.links, end, m)
        self.recomputations = range(codes.r * m, codes.drop * m)
        """Numbers of all R; the k-th R belongs to the F with number k, and runs only if this F drops activations."""
        self.start = [0.0] * len(self.duration)
        self.end = [0.0] * len(self.duration)
        """Operation -> time at which its result is ready."""
        self._free = [0.0] * (len(self.duration) + 1)
        """Operation -> time at which its rank can run the next operation; the last entry is for no operation."""
        self.tail = [0.0] * len(self.duration)
        """Operation -> length of the longest path from its start to the end of a rank, including the rank's `final`."""
        self.final = [0.0] * len(orders)
        """Rank -> negated start of its span or, if plans are compared by makespan, negated `Problem.first_start`."""
        self.cost = self.tie = 0.0
        """`cost` is the time by which orders are compared; `tie` decides between orders of equal cost."""
        self.restore([[codes.keeping(code) * m + k for code, k in codes.microbatches(order)] for order in orders])

    def restore(self, lanes: Sequence[Sequence[int]]) -> None:
        """Replace the orders of all ranks by `lanes`: the same operations, possibly with some R added or removed."""
        self.lanes = [list(lane) for lane in lanes]
        """Rank -> its operations in order."""
        self.position = {op: position for lane in lanes for position, op in enumerate(lane)}
        """Operation -> its position in the order of its rank."""
        self._before, self._after = [-1] * (len(self.duration) + 1), [-1] * (len(self.duration) + 1)
        """Operation -> the operation before it, or after it, in the order of its rank; -1 if there is none."""
        for lane in self.lanes:
            self._link([-1, *lane, -1])
        recomputed = {op - self.recomputations.start for op in self.position if op in self.recomputations}
        for forward in recomputed ^ self.dropped:
            self._drop(forward, drops=forward in recomputed)
        self._sequence = self._sorted(self.lanes)
        """All operations in topological order, after `evaluate` also in the order of their start times; empty if the
        ranks deadlock."""

    def replace(self, rank: int, first: int, end: int, part: Sequence[int]) -> bool:
        """Replace operations of a rank, and update the times; change nothing and return False if the ranks deadlock.

        The times of the present orders have been computed (see `evaluate`).

        Args:
            rank: the rank whose order changes.
            first: position of the first replaced operation.
            end: position after the last replaced operation.
            part: the replaced operations in their new order, possibly with some R added or removed.
        """
        lane, start, sequence = self.lanes[rank], self.start, self._sequence
        # Only the replaced operations change their order, so a cycle contains only operations that start between the
        # first and the last of them.
        low = bisect_left(sequence, start[lane[first]], key=start.__getitem__)
        high = bisect_right(sequence, start[lane[end - 1]], key=start.__getitem__)
        parts: list[list[int]] = [[] for _ in self.lanes]
        for op in sequence[low:high]:
            parts[self.rank_of[op]].append(op)
        ops = parts[rank]
        offset = first - self.position[ops[0]]
        ops[offset : offset + end - first] = part
        ordered = self._sorted(parts)
        if not ordered:
            return False
        before, after = {*lane[first:end]}, {*part}
        lane[first:end] = part
        for recomputation in before - after:
            del self.position[recomputation]
            self._drop(recomputation - self.recomputations.start, drops=False)
        for position in range(first, len(lane) if len(part) != end - first else end):
            self.position[lane[position]] = position
        for recomputation in after - before:
            self._drop(recomputation - self.recomputations.start, drops=True)
        self._link([-1, *lane, -1][first : first + len(part) + 2])
        sequence[low:high] = ordered
        self._evaluate(low, low + len(ordered))
        return True

    def _link(self, ops: Sequence[int]) -> None:
        for op, after in pairwise(ops):
            self._after[op], self._before[after] = after, op

    def _drop(self, forward: int, *, drops: bool) -> None:
        """Let the F with number `forward` drop its activations if `drops` is true, otherwise keep them."""
        code = forward // self.num_microbatches
        (self.dropped.add if drops else self.dropped.remove)(forward)
        self.allocation[forward] = self.problem.allocation[code + self.codes.drop * drops]

    def orders(self) -> list[Order]:
        m, drop = self.num_microbatches, self.codes.drop
        return [[op // m + drop * (op in self.dropped) for op in lane] for lane in self.lanes]

    def evaluate(self) -> bool:
        """Compute start times, and longest paths from every operation to the end; return False if ranks deadlock."""
        if self._sequence:
            self._evaluate(0, len(self._sequence))
        return bool(self._sequence)

    def _evaluate(self, low: int, high: int) -> None:
        """Compute start times from position `low` of the sequence on, and longest paths from positions below `high`."""
        final = self.final
        self._find_times(low)
        self._look_back(high if self.final == final else len(self._sequence))
        self._sequence.sort(key=self.start.__getitem__)

    def find_times(self) -> bool:
        """Compute the operations' start times; return False if the ranks deadlock."""
        if self._sequence:
            self._find_times(0)
        return bool(self._sequence)

    def _find_times(self, low: int) -> None:
        start, end, free, before = self.start, self.end, self._free, self._before
        latency, duration, needs = self.latency, self.duration, self.needs
        for op in islice(self._sequence, low, None):
            earliest = free[before[op]]
            for source, delay in needs[op]:
                ready_at = end[source] + delay
                if ready_at > earliest:
                    earliest = ready_at
            start[op] = earliest
            end[op] = earliest + latency[op]
            free[op] = earliest + duration[op]
        starts = [self._span_start(lane) for lane in self.lanes]
        ends = [self.end[lane[-1]] for lane in self.lanes]
        self.cost, self.tie = self.problem.judged_spans(starts, ends)
        if self.problem.takes_makespan:
            starts = [self.problem.first_start(starts)] * len(starts)
        self.final = [-start for start in starts]

    def _span_start(self, lane: Sequence[int]) -> float:
        """Time at which a rank's span starts.

        If a rank first runs embeddings, only the durations of these embeddings count: their sum is subtracted from the
        start of the first other operation.
        """
        m, codes, ahead = self.num_microbatches, self.codes, 0.0
        for op in lane:
            if not codes.e <= op // m < codes.ew:
                return self.start[op] + self.problem.receiving[op // m] - ahead
            ahead += self.duration[op]
        raise AssertionError("a rank runs more than embeddings")

    def _sorted(self, parts: Sequence[Sequence[int]]) -> list[int]:
        """Operations in topological order; [] if the ranks deadlock.

        Args:
            parts: rank -> successive operations of the rank. The ranks' earlier operations have run.
        """
        needs, waiting = self.needs, set(chain.from_iterable(parts))
        positions, ready = [0] * len(parts), list(range(len(parts)))
        awaited: dict[int, list[int]] = {}
        sequence: list[int] = []
        num_ops = len(waiting)
        while ready:
            rank = ready.pop()
            part, position = parts[rank], positions[rank]
            while position < len(part):
                op = part[position]
                for source, _ in needs[op]:
                    if source in waiting:
                        awaited.setdefault(source, []).append(rank)
                        break
                else:
                    waiting.remove(op)
                    sequence.append(op)
                    position += 1
                    if op in awaited:
                        ready += awaited.pop(op)
                    continue
                break
            positions[rank] = position
        return sequence if len(sequence) == num_ops else []

    def _look_back(self, high: int) -> None:
        """Compute the longest paths from the operations at positions below `high` of the sequence to the end."""
        latency, duration, users, tail, following = self.latency, self.duration, self.users, self.tail, self._after
        for op in reversed(self._sequence[:high]):
            after = following[op]
            longest = duration[op] + tail[after] if after >= 0 else latency[op] + self.final[self.rank_of[op]]
            for user, delay in users[op]:
                path = latency[op] + delay + tail[user]
                if path > longest:
                    longest = path
            tail[op] = longest

    def critical_stretches(self) -> Iterator[Stretch]:
        """Yield each `Stretch` of the critical path that has two or more operations, the last stretch first."""
        epsilon = 1e-9 * self.cost
        start, end, duration = self.start, self.end, self.duration
        ends = [end[lane[-1]] + final for lane, final in zip(self.lanes, self.final, strict=True)]
        rank = ends.index(max(ends))
        position = len(self.lanes[rank]) - 1
        while True:
            lane, last = self.lanes[rank], position
            op = lane[position]
            while position > 0 and start[before := lane[position - 1]] + duration[before] >= start[op] - epsilon:
                position, op = position - 1, before
            if last > position:
                yield Stretch(rank, position, last)
            if not self.needs[op]:
                return
            source, _ = max(self.needs[op], key=lambda need: end[need[0]] + need[1])
            rank, position = self.rank_of[source], self.position[source]

    def longest_through(self, rank: int, first: int, end: int, part: Sequence[int]) -> float:
        """Estimate the cost of a changed order: the length of the longest path through the operations in `part`.

        The estimate uses the start times and the critical paths of the current orders.

        Args:
            rank: the rank whose order changes.
            first: position of the first operation that `part` replaces.
            end: position after the last operation that `part` replaces.
            part: operations of the rank in their new order, including added R.
        """
        lane, ready_at, tail = self.lanes[rank], self.end, self.tail
        latency, duration, needs, users = self.latency, self.duration, self.needs, self.users
        now = self.start[lane[first - 1]] + duration[lane[first - 1]] if first > 0 else 0.0
        starts = []
        for op in part:
            for source, delay in needs[op]:
                if ready_at[source] + delay > now:
                    now = ready_at[source] + delay
            starts.append(now)
            now += duration[op]
        longest = 0.0
        after = tail[lane[end]] if end < len(lane) else None
        for op, start in zip(reversed(part), reversed(starts), strict=True):
            rest = latency[op] + self.final[rank] if after is None else duration[op] + after
            for user, delay in users[op]:
                path = latency[op] + delay + tail[user]
                if path > rest:
                    rest = path
            if start + rest > longest:
                longest = start + rest
            after = rest
        return longest


Neighbours = tuple[tuple[tuple[int, float], ...], ...]
"""Operation -> pairs (other operation, latency): sources of its inputs (`needs`), or users of its result (`users`)."""


@lru_cache(maxsize=16)
def _dependencies(
    links: tuple[tuple[int, int, float], ...], num_codes: int, num_microbatches: int
) -> tuple[Neighbours, Neighbours]:
    """Two mappings (see `Neighbours`): operation -> sources of its inputs, and operation -> users of its result."""
    needs: list[list[tuple[int, float]]] = [[] for _ in range(num_codes * num_microbatches)]
    users: list[list[tuple[int, float]]] = [[] for _ in needs]
    for source, target, latency in links:
        for k in range(num_microbatches):
            needs[target * num_microbatches + k].append((source * num_microbatches + k, latency))
            users[source * num_microbatches + k].append((target * num_microbatches + k, latency))
    return tuple(map(tuple, needs)), tuple(map(tuple, users))


def run_in_order(problem: Problem, orders: Sequence[Order]) -> PlannedOrders | None:
    """Return complete orders with their simulated times; None if the orders exceed a memory limit or deadlock."""
    for order, limit in zip(orders, problem.limits, strict=True):
        if max(accumulate(problem.allocation[code] for code in order)) > limit * (1 + 1e-9):
            return None
    graph = OrderGraph(problem, orders)
    return PlannedOrders(graph.cost, list(orders), graph.tie) if graph.find_times() else None
