"""Moves of a local search over the orders of all ranks, with repairs that keep every rank within its memory limit.

A *stretch* is a sequence of operations on the critical path that one rank runs without idle time. The critical path
gets shorter only if an operation moves before the first or after the last operation of its stretch (Balas and
Vazacopoulos 1998, Management Science 44). If a rank exceeds its memory limit after a move, a repair frees memory: some
W run earlier or, with planned recomputation, a microbatch drops its activations and gets an R (recomputation). A move
may also remove an R from the critical path, so that the F of the same microbatch and stage keeps its activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from megatron.zero_bubble.planner.critical_paths import OrderGraph, Stretch
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import tolerance
from megatron.zero_bubble.schedule.recomputation import Recompute

REACH = 6
"""Largest number of positions by which a move shifts an operation to an end of its stretch (see module docstring)."""
HORIZON = 200
"""Number of later operations among which a repair searches for a W to run earlier, or for a B that can get an R."""


class Move(NamedTuple):
    """A change of the order of one rank: `part` replaces the operations at the positions `first` to `end - 1`."""

    rank: int
    moved: int
    """Number (see `OrderGraph`) of the operation that the move shifts or removes."""
    first: int
    end: int
    """Position after the last operation that the move replaces."""
    part: list[int]
    """The replaced operations in their new order; some R (recomputations) may be added or removed."""

    @property
    def removes_r(self) -> bool:
        """Whether the moved operation is an R that the move removes."""
        return self.moved not in self.part


class OrderMoves:
    """The possible moves in the orders of an `OrderGraph`, and the memory of every rank in the current orders."""

    def __init__(self, problem: Problem, graph: OrderGraph) -> None:
        self.problem, self.graph = problem, graph
        self._keeps_forwards = problem.group_size is not None
        """Whether every rank keeps the order of its forwards."""
        self.limits = [limit + tolerance(limit) for limit in problem.limits]
        """Rank -> limit of its activation memory."""
        self.may_drop = problem.recompute is Recompute.PLANNED
        """Whether moves may add and remove recomputations (R)."""
        self.r = graph.recomputations
        m, codes = problem.num_microbatches, problem.codes
        self.b, self.w = (range(first * m, first * m + len(self.r)) for first in (codes.b, codes.w))
        """Numbers (see `OrderGraph`) of all B and of all W; the k-th B and the k-th W belong to the F with number k."""
        self._relatives: dict[int, set[int]] = {}
        """Operation -> the operations whose order relative to it is fixed by a dependency, as far as they are known."""
        self.measure()

    def measure(self) -> None:
        """Compute the memory of each rank before each operation of the rank's order."""
        self._memory = [self._memory_of(rank) for rank in range(self.problem.num_ranks)]
        """Rank -> memory before each operation of the rank's order."""

    def _memory_of(self, rank: int) -> list[float]:
        return [0.0, *accumulate(self.graph.allocation[op] for op in self.graph.lanes[rank])]

    def apply(self, move: Move) -> bool:
        """Make a move; change nothing and return False if the ranks deadlock."""
        runs = self.graph.replace(move.rank, move.first, move.end, move.part)
        if runs:
            self._memory[move.rank] = self._memory_of(move.rank)
        return runs

    def possible(self) -> Iterator[Move]:
        """Yield the moves of operations on the critical path; after a move, the rank may exceed its memory limit."""
        for stretch in self.graph.critical_stretches():
            yield from self._shifts(stretch)
            if self.may_drop:
                yield from self._without_r(stretch)

    def fitting(self, move: Move) -> Iterator[Move]:
        """Yield `move` if it fits in the rank's memory limit; otherwise yield repaired versions of `move` that fit."""
        moves: Iterable[Move | None] = [move]
        if not self._fits(move):
            first_drops = (False, True) if self.may_drop else (False,)
            moves = (_Repair(self, move, drops_first=drops_first).move() for drops_first in first_drops)
        yield from (each for each in moves if each is not None and self._keeps_recomputation(each))

    def _fits(self, move: Move) -> bool:
        memory, limit, allocation = self.memory_before(move), self.limits[move.rank], self.graph.allocation
        # If the move removes an R, the first operation is its F, which then allocates the memory of the R, too.
        memory += allocation[move.moved] if move.removes_r else 0
        for op in move.part:
            memory += allocation[op]
            if memory > limit:
                return False
        return True

    def memory_before(self, move: Move) -> float:
        """Memory in use on the rank of `move` before the first operation that `move` replaces."""
        return self._memory[move.rank][move.first]

    def _shifts(self, stretch: Stretch) -> Iterator[Move]:
        """Yield each move of an operation past the start or end of `stretch` that keeps the rank's dependencies."""
        rank, first, last = stretch
        lane = self.graph.lanes[rank]
        for low in range(last - 1, max(first - 1, last - 1 - REACH), -1):
            op, *passed = lane[low : last + 1]
            if self._may_pass(op, passed):
                yield Move(rank, op, low, last + 1, [*passed, op])
        for high in range(first + 1, min(last + 1, first + 1 + REACH)):
            *passed, op = lane[first : high + 1]
            if self._may_pass(op, passed):
                yield Move(rank, op, first, high + 1, [op, *passed])

    def _may_pass(self, op: int, others: Sequence[int]) -> bool:
        """Whether an operation can move past other operations of its rank; each kind keeps its microbatch order."""
        m, size = self.problem.num_microbatches, self.problem.codes.b
        code, codes = op // m, [other // m for other in others]
        if code in codes or (self._keeps_forwards and code < size and min(codes) < size):
            return False
        relatives = self._relatives.get(op)
        if relatives is None:
            relatives = self._relatives[op] = self._relatives_of(op)
        return relatives.isdisjoint(others)

    def _relatives_of(self, op: int) -> set[int]:
        """The operations whose order relative to `op` is fixed by a dependency."""
        codes, m = self.problem.codes, self.problem.num_microbatches
        step = codes.b * m
        same = range(op % step, codes.drop * m, step) if op < codes.drop * m else ()
        return {*same, *(source for source, _ in self.graph.needs[op]), *(user for user, _ in self.graph.users[op])}

    def _without_r(self, stretch: Stretch) -> Iterator[Move]:
        """Yield moves that remove an R of `stretch`, so that the F of the same microbatch keeps its activations."""
        lane = self.graph.lanes[stretch.rank]
        for position in range(stretch.first, stretch.last + 1):
            if (recomputation := lane[position]) in self.r:
                first = self.graph.position[recomputation - self.r.start]
                part = lane[first:position] + lane[position + 1 : position + 2]
                yield Move(stretch.rank, recomputation, first, position + 2, part)

    def _keeps_recomputation(self, move: Move) -> bool:
        """Whether every B without an R directly follows the F of its microbatch, as full recomputation requires."""
        if self.problem.recompute is not Recompute.FULL:
            return True
        lane = self.graph.lanes[move.rank]
        changed = [*lane[max(0, move.first - 1) : move.first], *move.part, *lane[move.end : move.end + 1]]
        return all(
            later == op + len(self.b)
            for op, later in pairwise(changed)
            if op < len(self.b) and op not in self.graph.dropped
        )


class _Repair:
    """Repairs a move after which a rank would exceed its memory limit.

    The repair places operations one by one in the order of the move. Before an operation that would exceed the memory
    limit, the repair places the next W, or drops activations and inserts an R that restores the activations before
    their backward.
    """

    def __init__(self, moves: OrderMoves, move: Move, *, drops_first: bool) -> None:
        self._graph, self._move = moves.graph, move
        self._lane = moves.graph.lanes[move.rank]
        self._order = list(move.part)
        """Operations of the rank, in order, from the first position that the move changes (see `_unplaced`)."""
        self._num_placed, self._end, self._loaded = 0, move.end, move.end
        """`_loaded` is the position in the lane up to which `_order` contains the operations of the rank."""
        self._limit, self._memory = moves.limits[move.rank], moves.memory_before(move)
        self._kept = move.part[0] if move.removes_r else None
        """The F that drops its activations before the move and keeps them afterwards; None if the move removes no R."""
        self._new_drops: set[int] = set()
        """The F that keep their activations before the move and drop them afterwards, as in `OrderGraph.dropped`."""
        self._b, self._w, self._r = moves.b, moves.w, moves.r
        repairs = [self._place_weight_gradient, self._drop]
        self._repairs = repairs[::-1] if drops_first else repairs[: 1 + moves.may_drop]

    def move(self) -> Move | None:
        """The repaired move; None if the rank exceeds its memory limit even after all repairs."""
        while len(self._order) - self._num_placed > self._loaded - self._end:
            op = self._order[self._num_placed]
            amount = self._graph.allocation[op]
            if op == self._kept or op in self._new_drops:
                amount += self._restored(op) * (1 if op == self._kept else -1)
            if amount <= 0 or self._memory + amount <= self._limit:
                self._memory += amount
                self._num_placed += 1
            elif not any(repair() for repair in self._repairs):
                return None
        return self._move._replace(end=self._end, part=self._order[: self._num_placed])

    def _restored(self, forward: int) -> float:
        """Memory that the R of the F `forward` allocates; zero if `forward` is not the number of an F."""
        return self._graph.allocation[self._r[forward]] if forward < len(self._r) else 0.0

    def _drops(self, forward: int) -> bool:
        """Whether the F `forward` drops its activations after the repairs so far."""
        return forward in self._graph.dropped or forward in self._new_drops

    def _unplaced(self) -> list[int]:
        """The next `HORIZON` operations that have not been placed."""
        end = self._num_placed + HORIZON
        if len(self._order) < end:
            more = self._lane[self._loaded : self._loaded + HORIZON]
            self._loaded += len(more)
            self._order += more
        return self._order[self._num_placed : end]

    def _place_weight_gradient(self) -> bool:
        """Place the first W that can run before the next operation; return whether the W releases memory."""
        num_placed, first, end = self._num_placed, self._w.start, self._w.stop
        from_b = first - self._b.start
        unplaced = self._unplaced()
        waiting = set(unplaced)
        for position, op in enumerate(unplaced, num_placed):
            if first <= op < end and op - from_b not in waiting:
                self._order.insert(num_placed, self._order.pop(position))
                self._end = max(self._end, self._graph.position[op] + 1)
                return self._graph.allocation[op] < 0
        return False

    def _drop(self) -> bool:
        """Drop activations that are in memory, and insert their R; return False if no activations can be dropped.

        The candidates are the activations that may be dropped. For each candidate, the repair computes the length of
        the longest path of dependencies through the candidate's R. The candidate with the smallest length is dropped
        or, if lengths are equal, the candidate with the latest backward.
        """
        graph, num_placed, m = self._graph, self._num_placed, self._graph.num_microbatches
        unplaced = self._unplaced()[1:]
        waiting = set(unplaced)
        best, shortest = None, inf
        first, end = self._b.start, self._b.stop
        for position, op in enumerate(unplaced, num_placed + 1):
            if first <= op < end and self._may_drop(op - first, waiting, position):
                forward = op - first
                before = self._lane[graph.position[op] - 1]
                path = graph.start[before] + graph.duration[before] + graph.duration[self._r[forward]] + graph.tail[op]
                if path <= shortest:
                    best, shortest = forward, path
        if best is None:
            return False
        later_of_stage = range(self._r[best], self._r[best] + m - best % m)
        place = next(
            place for place, op in enumerate(unplaced, num_placed + 1) if op in later_of_stage or op == self._b[best]
        )
        # An R that this repair has inserted has no position yet, and is already within the replaced part.
        self._end = max(self._end, graph.position.get(self._order[place], 0))
        self._order.insert(place, self._r[best])
        self._new_drops.add(best)
        if best != self._order[num_placed]:
            self._memory -= self._restored(best)
        return True

    def _may_drop(self, forward: int, waiting: set[int], position: int) -> bool:
        """Whether the activations of the F `forward`, whose B is at `position`, are in memory and may be dropped.

        No R can be inserted after the R of a later microbatch, because a stage runs its R in microbatch order.
        """
        if forward in waiting or self._drops(forward) or self._restored(forward) <= 0:
            return False
        if position == self._num_placed + 1 and forward == self._order[self._num_placed]:
            return False
        m = self._graph.num_microbatches
        later = next((self._r[each] for each in range(forward, (forward // m + 1) * m) if self._drops(each)), None)
        return later is None or later in waiting
