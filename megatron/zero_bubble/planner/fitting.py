"""Makes a plan that keeps everything fit into less memory: drops activations, and restores each right before its B."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron.zero_bubble.planner.codes import Order
from megatron.zero_bubble.planner.critical_paths import OrderGraph
from megatron.zero_bubble.planner.event_loop import PlannedOrders
from megatron.zero_bubble.planner.problem import Problem, tolerance


class _Drop(NamedTuple):
    """The memory that a rank saves if one microbatch of one stage drops its activations between F and B."""

    f: int
    """The position of F in the rank's order."""
    b: int
    room: float


def dropped_to_fit(problem: Problem, plan: PlannedOrders) -> list[Order] | None:
    """The orders of `plan`, which has no R, with the R that the limits demand; None if even that does not fit.

    At the first point where the limit is exceeded, a rank drops the activations that free most memory during all
    operations that exceed it.
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
    """Every F of the rank to drop the activations of; None if that is not enough."""
    lane, limit = graph.lanes[rank], graph.problem.limits[rank]
    changes = [graph.allocation[op] for op in lane]
    held = [after - min(0, change) for after, change in zip(accumulate(changes), changes, strict=True)]
    """Position -> memory of the rank while it runs that operation."""
    drops = list(_possible_drops(graph, rank))
    dropped, most = set(), limit + tolerance(limit)
    exceeding = [position for position, amount in enumerate(held) if amount > most]
    while exceeding:
        drops = [drop for drop in drops if drop.b > exceeding[0]]
        choices = [drop for drop in drops if drop.f <= exceeding[0]]
        if not choices:
            return None
        chosen = max(choices, key=lambda drop: drop.room * bisect_left(exceeding, drop.b))
        drops.remove(chosen)
        dropped.add(lane[chosen.f])
        for position in exceeding[: bisect_left(exceeding, chosen.b)]:
            held[position] -= chosen.room
        exceeding = [position for position in exceeding if held[position] > most]
    return dropped


def _possible_drops(graph: OrderGraph, rank: int) -> Iterator[_Drop]:
    """All activations that can be dropped. Where B follows F at once, dropping them saves nothing."""
    problem, lane = graph.problem, graph.lanes[rank]
    m, size = problem.num_microbatches, problem.num_stages
    for position, op in enumerate(lane):
        if op < size * m:
            drop = _Drop(position, graph.position[op + size * m], problem.footprints[op // m].restored)
            if drop.b > drop.f + 1 and drop.room > 0:
                yield drop


def _with_r(problem: Problem, lane: Sequence[int], dropped: set[int]) -> Iterator[int]:
    """The codes of the operations, with an R before the B of everything that is dropped."""
    m, codes = problem.num_microbatches, problem.codes
    for op in lane:
        code = op // m
        if codes.b <= code < codes.w and op - codes.b * m in dropped:
            yield code - codes.b + codes.r
        yield code + codes.drop if op in dropped else code
