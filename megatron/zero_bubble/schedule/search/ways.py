"""When every operation of complete orders starts, and the longest way from there to the end of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron.zero_bubble.schedule.search.problem import Order, Problem


class Stretch(NamedTuple):
    """A part of the critical path: what `rank` runs without a break, from position `first` to `last` of its order."""

    rank: int
    first: int
    last: int


class Ways:
    """Complete orders as a graph, with the longest ways through every operation.

    Operations are numbers: that of `code`, as in `Order`, and microbatch k is `code * num_microbatches + k`. An F that
    drops its activations has the number of an F that keeps them.
    """

    def __init__(self, problem: Problem, orders: Sequence[Order]) -> None:
        size, m = problem.num_stages, problem.num_microbatches
        codes = [code for code in range(4 * size) for _ in range(m)]
        self.problem = problem
        self.num_microbatches = m
        self.duration = [problem.duration[code] for code in codes]
        self.latency = [problem.latency[code] for code in codes]
        self.allocation = [problem.allocation[code] for code in codes]
        self.rank_of = [problem.rank_of[code % size] for code in codes]
        self.dropped: set[int] = set()
        """Every F that drops its activations."""
        self.needed = [-1] * len(codes)
        """Operation -> the one whose result it waits for, from the stage before or after; -1: none."""
        self.user = [-1] * len(codes)
        """Operation -> the one that waits for its result."""
        self.way = [0.0] * len(codes)
        """Operation -> how long the result that it waits for is on its way."""
        for stage in range(size):
            for f in range(stage * m, stage * m + m):
                b = f + size * m
                if stage + 1 < size:
                    self._link(f, f + m, problem.message[stage])
                    self._link(b + m, b, problem.message[stage])
                else:
                    self._link(f, b, 0)
        self.lanes = [self._numbers(order) for order in orders]
        """Rank -> its operations in order."""
        self.position = {op: position for lane in self.lanes for position, op in enumerate(lane)}
        """Operation -> its place in the order of its rank."""
        self.start = [0.0] * len(codes)
        self.end = [0.0] * len(codes)
        """Operation -> when its result is there."""
        self.tail = [0.0] * len(codes)
        """Operation -> the longest way from its start to the end of the rank that counts, less that rank's begin."""
        self.final = [0.0] * len(orders)
        """Rank -> what the end of its last operation adds to a way: less its begin."""
        self.cost = self.tie = 0.0
        """As in `PlannedOrders`."""

    def _link(self, source: int, target: int, way: float) -> None:
        self.needed[target], self.user[source], self.way[target] = source, target, way

    def _numbers(self, order: Order) -> list[int]:
        size = self.problem.num_stages
        lane = []
        for code, microbatch in self.problem.microbatches(order):
            number = code % (4 * size) * self.num_microbatches + microbatch
            if code >= 4 * size:
                self.dropped.add(number)
                self.allocation[number] = self.problem.allocation[code]
            lane.append(number)
        return lane

    def move(self, rank: int, source: int, target: int) -> None:
        """Take the operation at position `source` of the order of `rank` to position `target`."""
        lane = self.lanes[rank]
        lane.insert(target, lane.pop(source))
        for position in range(min(source, target), max(source, target) + 1):
            self.position[lane[position]] = position

    def orders(self) -> list[Order]:
        m, size = self.num_microbatches, self.problem.num_stages
        return [[op // m + 4 * size * (op in self.dropped) for op in lane] for lane in self.lanes]

    def evaluate(self) -> bool:
        """Find the times and ways of the orders; False if the ranks wait for each other for ever."""
        sequence = self._run()
        if len(sequence) < sum(map(len, self.lanes)):
            return False
        begins = [self.start[lane[0]] + self.problem.receiving[lane[0] // self.num_microbatches] for lane in self.lanes]
        ends = [self.end[lane[-1]] for lane in self.lanes]
        span = max(end - begin for begin, end in zip(begins, ends, strict=True))
        makespan = max(ends) - min(begins)
        self.cost, self.tie = self.problem.judged(span, makespan)
        if self.problem.is_judged_by_makespan:
            begins = [min(begins)] * len(begins)
        self.final = [-begin for begin in begins]
        self._look_back(sequence)
        return True

    def _run(self) -> list[int]:
        """The operations in an order in which they can start, those that never can left out."""
        start, needed, way, user = self.start, self.needed, self.way, self.user
        latency, duration, rank_of = self.latency, self.duration, self.rank_of
        end = self.end = [-1.0] * len(start)
        positions, free = [0] * len(self.lanes), [0.0] * len(self.lanes)
        ready = list(range(len(self.lanes)))
        awaited: set[int] = set()
        sequence: list[int] = []
        while ready:
            rank = ready.pop()
            lane, position, now = self.lanes[rank], positions[rank], free[rank]
            while position < len(lane):
                op = lane[position]
                source = needed[op]
                if source >= 0:
                    there = end[source]
                    if there < 0:
                        awaited.add(source)
                        break
                    there += way[op]
                    if there > now:
                        now = there
                start[op] = now
                end[op] = now + latency[op]
                now += duration[op]
                sequence.append(op)
                position += 1
                if op in awaited:
                    ready.append(rank_of[user[op]])
            positions[rank], free[rank] = position, now
        return sequence

    def _look_back(self, sequence: Sequence[int]) -> None:
        """Find the longest ways to the end."""
        following = [-1] * len(self.start)
        for lane in self.lanes:
            for op, after in pairwise(lane):
                following[op] = after
        latency, duration, user_of, way, tail = self.latency, self.duration, self.user, self.way, self.tail
        for op in reversed(sequence):
            after, user = following[op], user_of[op]
            longest = duration[op] + tail[after] if after >= 0 else latency[op] + self.final[self.rank_of[op]]
            if user >= 0:
                longest = max(longest, latency[op] + way[user] + tail[user])
            tail[op] = longest

    def critical_stretches(self) -> Iterator[Stretch]:
        """The critical path, from its end to its beginning, as far as ranks run two or more operations on it."""
        epsilon = 1e-9 * self.cost
        ends = [self.end[lane[-1]] + final for lane, final in zip(self.lanes, self.final, strict=True)]
        rank = ends.index(max(ends))
        position = last = len(self.lanes[rank]) - 1
        while True:
            lane = self.lanes[rank]
            op = lane[position]
            before = lane[position - 1]
            if position > 0 and self.start[before] + self.duration[before] >= self.start[op] - epsilon:
                position -= 1
                continue
            if last > position:
                yield Stretch(rank, position, last)
            source = self.needed[op]
            if source < 0:
                return
            rank = self.rank_of[source]
            position = last = self.position[source]

    def longest_through(self, rank: int, low: int, part: Sequence[int]) -> float:
        """The longest way through the operations of `part`, if `rank` ran them in this order from position `low` on.

        An estimate of the cost: the ways to and from them may change too.
        """
        lane = self.lanes[rank]
        high = low + len(part)
        now = self.start[lane[low - 1]] + self.duration[lane[low - 1]] if low > 0 else 0.0
        starts = []
        for op in part:
            source = self.needed[op]
            if source >= 0:
                now = max(now, self.end[source] + self.way[op])
            starts.append(now)
            now += self.duration[op]
        longest = 0.0
        after = self.tail[lane[high]] if high < len(lane) else None
        for op, start in zip(reversed(part), reversed(starts), strict=True):
            rest = self.latency[op] + self.final[rank] if after is None else self.duration[op] + after
            user = self.user[op]
            if user >= 0:
                rest = max(rest, self.latency[op] + self.way[user] + self.tail[user])
            longest = max(longest, start + rest)
            after = rest
        return longest
