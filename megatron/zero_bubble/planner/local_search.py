"""Improves complete orders for any placement by a tabu search with restarts, which moves one operation at a time.

A plan gets shorter only if its critical path gets shorter. A *stretch* is a sequence of operations on the critical path
that one rank runs without idle time; the critical path gets shorter only if an operation moves before the first or
after the last operation of its stretch (Balas and Vazacopoulos 1998, Management Science 44). The search makes the move
with the lowest estimated cost, even if the plan gets longer, and saves the best plan. After many moves without a better
plan, the search returns to the best plan, makes a few random moves and continues (iterated local search).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from random import Random
from typing import NamedTuple

from megatron.zero_bubble.planner.critical_paths import OrderGraph, Stretch
from megatron.zero_bubble.planner.event_loop import PlannedOrders
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import tolerance
from megatron.zero_bubble.schedule.recomputation import Recompute

REACH = 6
"""Number of operations next to each end of a stretch of the critical path that the search tries to move past that end.
A `Stretch` is a sequence of operations that one rank runs without idle time."""
TENURE = 12
"""Number of moves of the search during which a moved operation has to keep its new position (tabu tenure)."""
PATIENCE = 50
"""Largest number of moves in a row without a better plan, before a restart."""
OPERATIONS_PER_MOVE = 8
"""In a small problem, the number of moves in a row without a better plan is at most the number of operations of the
problem, divided by this number."""
ATTEMPTS = 3
"""Largest number of moves that are tried, from the lowest estimated cost up, until a move causes no deadlock."""
RESTARTS = 15
"""Largest number of restarts in a row without a better plan, before the search ends."""
WORTH_RESTARTING = 1.001
"""The search restarts only if its best plan takes longer than this factor times the lower bound."""
KICK = 6
"""Number of random moves of a restart."""
MOVE_WEIGHT = 0.3
"""Processor time of a move, as a fraction of the time in which the event loop's fastest policy plans the problem."""


def improve(
    problem: Problem, plan: PlannedOrders, budget: int, *, keeps_forwards: bool = False
) -> tuple[PlannedOrders, int]:
    """Improve a plan by moving operations.

    Args:
        problem: the problem that the plan solves.
        plan: the plan to start from.
        budget: effort of the search, as a number of planned operations.
        keeps_forwards: whether every rank keeps the order of its forwards.

    Returns:
        The best plan, and the unspent budget.
    """
    search, generator = _LocalSearch(problem, plan, keeps_forwards=keeps_forwards), Random(0)
    weight = round(MOVE_WEIGHT * problem.num_ops)
    num_failed = 0
    while True:
        before = search.best.cost
        while budget > 0 and search.can_improve:
            budget -= weight
            search.move()
        num_failed = 0 if search.best.cost < before - tolerance(before) else num_failed + 1
        if budget <= 0 or num_failed > RESTARTS or search.best.cost <= problem.bound * WORTH_RESTARTING:
            return search.best, budget
        budget -= weight * KICK
        search.restart(generator)


class _Move(NamedTuple):
    """A move of one operation of `rank` from position `source` of the rank's order to position `target`."""

    rank: int
    source: int
    target: int


class _LocalSearch:
    """The state of a search: current orders, best plan and tabu list."""

    def __init__(self, problem: Problem, plan: PlannedOrders, *, keeps_forwards: bool) -> None:
        self.problem = problem
        self.keeps_forwards = keeps_forwards
        self.best = plan
        self.graph = OrderGraph(problem, plan.orders)
        runs = self.graph.evaluate()
        assert runs, "a plan does not deadlock"
        self.limits = [limit + tolerance(limit) for limit in problem.limits]
        self.memory = [self._memory_of(rank) for rank in range(problem.num_ranks)]
        """Rank -> memory before each operation of the rank's order."""
        self.num_moves = 0
        self.last_success = 0
        """Value of `num_moves` when the search last found a better plan or restarted."""
        self.stays: dict[int, int] = {}
        """Tabu list: operation -> last value of `num_moves` at which the operation has to keep its position."""
        self.is_stuck = False
        self.best_lanes = [list(lane) for lane in self.graph.lanes]
        """Rank -> its operations in the best plan."""

    @property
    def can_improve(self) -> bool:
        patience = min(PATIENCE, self.problem.num_ops // OPERATIONS_PER_MOVE)
        is_patient = self.num_moves - self.last_success < patience
        return is_patient and not self.is_stuck and self.best.cost > self.problem.aim

    def restart(self, generator: Random) -> None:
        """Return to the best plan, and make a few random moves."""
        self.graph.restore(self.best_lanes)
        self.graph.evaluate()
        self.memory = [self._memory_of(rank) for rank in range(self.problem.num_ranks)]
        self.stays.clear()
        self.is_stuck, self.last_success = False, self.num_moves
        for _ in range(KICK):
            moves = list(self._moves())
            for move in generator.sample(moves, min(ATTEMPTS, len(moves))):
                self._apply(move)
                if self.graph.evaluate():
                    break
                self._apply(_Move(move.rank, move.target, move.source))
                self.graph.evaluate()

    def move(self) -> None:
        """Make the move with the lowest estimated cost among the moves that cause no deadlock."""
        self.num_moves += 1
        for move in self._promising()[:ATTEMPTS]:
            self.stays[self.graph.lanes[move.rank][move.source]] = self.num_moves + TENURE
            self._apply(move)
            if self.graph.evaluate():
                self._keep_if_better()
                return
            self._apply(_Move(move.rank, move.target, move.source))
            self.graph.evaluate()
        self.is_stuck = True

    def _apply(self, move: _Move) -> None:
        self.graph.move(*move)
        self.memory[move.rank] = self._memory_of(move.rank)

    def _memory_of(self, rank: int) -> list[float]:
        return [0.0, *accumulate(self.graph.allocation[op] for op in self.graph.lanes[rank])]

    def _keep_if_better(self) -> None:
        graph, best = self.graph, self.best
        small = tolerance(best.cost)
        if graph.cost < best.cost - small or (graph.cost < best.cost + small and graph.tie < best.tie - small):
            self.best = PlannedOrders(graph.cost, graph.orders(), graph.tie)
            self.best_lanes = [list(lane) for lane in graph.lanes]
            self.last_success = self.num_moves

    def _promising(self) -> list[_Move]:
        """The moves in the order of their estimated costs.

        A move of an operation in the tabu list `stays` is left out unless its estimated cost is below the cost of the
        best plan.
        """
        estimated = []
        for move in self._moves():
            cost = self.graph.longest_through(move.rank, min(move.source, move.target), self._part(move))
            stays = self.stays.get(self.graph.lanes[move.rank][move.source], 0) >= self.num_moves
            if not stays or cost < self.best.cost - tolerance(self.best.cost):
                estimated.append((cost, move))
        return [move for _, move in sorted(estimated)]

    def _moves(self) -> Iterator[_Move]:
        for stretch in self.graph.critical_stretches():
            for move in self._moves_out_of(stretch):
                if self._keeps_dependencies(move) and self._fits(move) and self._keeps_recomputation(move):
                    yield move

    @staticmethod
    def _moves_out_of(stretch: Stretch) -> Iterator[_Move]:
        for source in range(stretch.last - 1, max(stretch.first - 1, stretch.last - 1 - REACH), -1):
            yield _Move(stretch.rank, source, stretch.last)
        for source in range(stretch.first + 1, min(stretch.last + 1, stretch.first + 1 + REACH)):
            yield _Move(stretch.rank, source, stretch.first)

    def _part(self, move: _Move) -> list[int]:
        """The operations between the two positions of the move (both included), in their order after the move."""
        low, high = min(move.source, move.target), max(move.source, move.target)
        part = self.graph.lanes[move.rank][low : high + 1]
        part.insert(move.target - low, part.pop(move.source - low))
        return part

    def _keeps_dependencies(self, move: _Move) -> bool:
        """Whether the move keeps all dependencies between operations of the rank."""
        lane = self.graph.lanes[move.rank]
        op = lane[move.source]
        if move.source < move.target:
            return not any(self._waits_for(op, other) for other in lane[move.source + 1 : move.target + 1])
        return not any(self._waits_for(other, op) for other in lane[move.target : move.source])

    def _waits_for(self, earlier: int, later: int) -> bool:
        """Whether `later`, which comes after `earlier` on the same rank, must stay after `earlier`.

        Operations of one kind and stage keep the order of microbatches. F, R, B and W of one microbatch and stage keep
        their order. An operation on a vocabulary shard comes after the operations whose results it needs.
        """
        m, size = self.problem.num_microbatches, self.problem.num_stages
        code, other = earlier // m, later // m
        if self.keeps_forwards and max(code, other) < size:
            return True
        is_on_stage = max(code, other) < self.problem.codes.e
        is_same_microbatch = is_on_stage and code % size == other % size and earlier % m == later % m
        return code == other or is_same_microbatch or any(need == earlier for need, _ in self.graph.needs[later])

    def _fits(self, move: _Move) -> bool:
        """Whether the rank's memory stays within its limit after the move."""
        memory = self.memory[move.rank][min(move.source, move.target)]
        for op in self._part(move):
            memory += self.graph.allocation[op]
            if memory > self.limits[move.rank]:
                return False
        return True

    def _keeps_recomputation(self, move: _Move) -> bool:
        """Whether every B without an R (recomputation) still runs right after its F, as full recomputation requires."""
        if self.problem.recompute is not Recompute.FULL:
            return True
        lane, low, high = self.graph.lanes[move.rank], min(move.source, move.target), max(move.source, move.target)
        changed = [*lane[max(0, low - 1) : low], *self._part(move), *lane[high + 1 : high + 2]]
        num_forwards = self.problem.num_stages * self.problem.num_microbatches
        return all(
            later == op + num_forwards
            for op, later in pairwise(changed)
            if op < num_forwards and op not in self.graph.dropped
        )
