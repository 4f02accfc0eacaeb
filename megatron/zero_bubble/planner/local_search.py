"""Improves complete orders for any placement by a tabu search with restarts, which changes one rank at a time.

The search moves operations of the critical path (see `OrderMoves`), because a plan gets shorter only if its critical
path gets shorter. The search makes the move with the lowest estimated cost, even if the plan gets longer, and saves the
best plan. After many moves without a better plan, the search returns to the best plan, makes a few random moves and
continues (iterated local search).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from random import Random

from megatron.zero_bubble.planner.critical_paths import OrderGraph
from megatron.zero_bubble.planner.event_loop import PlannedOrders
from megatron.zero_bubble.planner.order_moves import Move, OrderMoves
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import tolerance

TENURE = 12
"""Number of moves of the search during which a moved operation has to keep its new position (tabu tenure)."""
PATIENCE = 50
"""Largest number of moves in a row without a better plan, before a restart."""
OPERATIONS_PER_MOVE = 8
"""In a small problem the search restarts after `num_ops / OPERATIONS_PER_MOVE` moves without a better plan."""
ATTEMPTS = 3
"""Largest number of moves that are tried, in the order of their estimated costs, until a move causes no deadlock."""
RESTARTS = 8
"""Largest number of restarts in a row without a better plan, before the search ends."""
WORTH_RESTARTING = 1.001
"""The search restarts only if its best plan takes longer than this factor times the lower bound."""
KICK = 6
"""Number of random moves of a restart."""
MOVE_WEIGHT = 0.3
"""Processor time of a move, as a fraction of the time in which the event loop's fastest policy plans the problem."""


def improve(
    problem: Problem, plan: PlannedOrders, budget: int, *, restarts: int = RESTARTS
) -> tuple[PlannedOrders, int]:
    """Improve a plan by moving operations.

    Args:
        budget: effort of the search, as a number of planned operations.
        restarts: largest number of restarts in a row without a better plan, before the search ends.

    Returns:
        The best plan, and the unspent budget.
    """
    search, generator = _LocalSearch(problem, plan), Random(0)
    weight = move_cost(problem)
    num_failed = 0
    while True:
        before = search.best.cost
        while budget > 0 and search.can_improve:
            budget -= weight
            search.move()
        num_failed = 0 if search.best.cost < before - tolerance(before) else num_failed + 1
        if budget <= 0 or num_failed > restarts or search.best.cost <= problem.bound * WORTH_RESTARTING:
            return search.best, budget
        budget -= weight * KICK
        search.restart(generator)


def move_cost(problem: Problem) -> int:
    """Budget that a move of the local search takes, as a number of planned operations."""
    return max(1, round(MOVE_WEIGHT * problem.num_ops))


class _LocalSearch:
    """The state of a search: current orders, best plan and tabu list."""

    def __init__(self, problem: Problem, plan: PlannedOrders) -> None:
        self.problem = problem
        self.best = plan
        self.graph = OrderGraph(problem, plan.orders)
        runs = self.graph.evaluate()
        assert runs, "a plan does not deadlock"
        self.moves = OrderMoves(problem, self.graph)
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
        self.moves.measure()
        self.stays.clear()
        self.is_stuck, self.last_success = False, self.num_moves
        for _ in range(KICK):
            moves = list(self.moves.possible())
            for move in generator.sample(moves, min(ATTEMPTS, len(moves))):
                if any(map(self.moves.apply, islice(self.moves.fitting(move), 1))):
                    break

    def move(self) -> None:
        """Make the move with the lowest estimated cost among the moves that cause no deadlock."""
        self.num_moves += 1
        for move in islice(self._promising(), ATTEMPTS):
            self.stays[move.moved] = self.num_moves + TENURE
            if self.moves.apply(move):
                graph, best, small = self.graph, self.best, tolerance(self.best.cost)
                if graph.cost < best.cost - small or (graph.cost < best.cost + small and graph.tie < best.tie - small):
                    self.best = PlannedOrders(graph.cost, graph.orders(), graph.tie)
                    self.best_lanes = [list(lane) for lane in graph.lanes]
                    self.last_success = self.num_moves
                return
        self.is_stuck = True

    def _promising(self) -> Iterator[Move]:
        """Yield the moves in the order of their estimated costs, from the lowest cost.

        A repair seldom lowers the estimated cost of a move, so a move is repaired only if its cost before the repair is
        the lowest. A move of an operation in the tabu list `stays` is left out unless its estimated cost is below the
        cost of the best plan.
        """
        shorter = self.best.cost - tolerance(self.best.cost)
        tabu = {op for op, last in self.stays.items() if last >= self.num_moves}
        queue = [(self._estimate(move), False, move) for move in self.moves.possible()]
        heapify(queue)
        while queue:
            cost, fits, move = heappop(queue)
            if move.moved in tabu and cost >= shorter:
                continue
            if fits:
                yield move
                continue
            for fitting in self.moves.fitting(move):
                heappush(queue, (self._estimate(fitting), True, fitting))

    def _estimate(self, move: Move) -> float:
        return self.graph.longest_through(move.rank, move.first, move.end, move.part)
