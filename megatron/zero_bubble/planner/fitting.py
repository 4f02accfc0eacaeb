"""Fits a plan without recomputation into less memory: drops activations and recomputes them right before their B."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.critical_paths import OrderGraph
from megatron.zero_bubble.planner.event_loop import PlannedOrders
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import tolerance


class _Drop(NamedTuple):
    """Activations of one microbatch and stage that a rank may drop between F and B."""

    f: int
    """Position of F in the order of the rank."""
    b: int
    """Position of B in the order of the rank."""
    memory: float
    """Memory that becomes free between F and B if the rank drops the activations."""


def dropped_to_fit(problem: Problem, plan: PlannedOrders) -> list[Order] | None:
    """The orders of a plan with as many recomputations (R) as the memory limits demand.

    Each rank drops the activations of one microbatch and stage at a time, until the rank is within its memory limit. A
    rank chooses among the activations that are in memory at the first operation at which the rank exceeds its memory
    limit. The rank drops the activations that free the most memory, summed over all operations at which the rank
    exceeds its memory limit.

    Args:
        problem: the planning problem, whose memory limits apply to the returned orders.
        plan: a plan without recomputation (R).

    Returns:
        The orders with R; None if a rank exceeds its memory limit even with every possible recomputation.
    """
    graph = OrderGraph(problem, plan.orders)
    orders = []
    for rank, lane in enumerate(graph.lanes):
        dropped = _dropped(graph, rank)
        if dropped is None:
            return None
        orders.append(list(_with_r(problem, lane, dropped)))
    return orders


def _dropped(graph: OrderGraph, rank: int) -> set[int] | None:
    """Numbers (see `OrderGraph`) of the F whose activations a rank drops to fit in memory; None if no choice fits."""
    lane, limit = graph.lanes[rank], graph.problem.limits[rank]
    changes = [graph.allocation[op] for op in lane]
    memory = [after - min(0, change) for after, change in zip(accumulate(changes), changes, strict=True)]
    """Position -> memory of the rank while it runs the operation at this position."""
    m, num_forwards = graph.num_microbatches, graph.codes.b * graph.num_microbatches
    drops = [
        _Drop(position, graph.position[op + num_forwards], graph.problem.footprints[op // m].restored)
        for position, op in enumerate(lane)
        if op < num_forwards
    ]
    drops = [drop for drop in drops if drop.b > drop.f + 1 and drop.memory > 0]
    dropped, most = set(), limit + tolerance(limit)
    exceeding = [position for position, amount in enumerate(memory) if amount > most]
    while exceeding:
        drops = [drop for drop in drops if drop.b > exceeding[0]]
        choices = [drop for drop in drops if drop.f <= exceeding[0]]
        if not choices:
            return None
        chosen = max(choices, key=lambda drop: drop.memory * bisect_left(exceeding, drop.b))
        drops.remove(chosen)
        dropped.add(lane[chosen.f])
        for position in exceeding[: bisect_left(exceeding, chosen.b)]:
            memory[position] -= chosen.memory
        exceeding = [position for position in exceeding if memory[position] > most]
    return dropped


def _with_r(problem: Problem, lane: Sequence[int], dropped: set[int]) -> Iterator[int]:
    """Yield the codes of the operations, with an R before the B of each microbatch whose activations are dropped."""
    m, codes = problem.num_microbatches, problem.codes
    for op in lane:
        code = op // m
        if codes.b <= code < codes.w and op - codes.b * m in dropped:
            yield code - codes.b + codes.r
        yield code + codes.drop if op in dropped else code
