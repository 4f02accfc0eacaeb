"""Makes a plan that keeps everything fit into less memory: drops activations, and restores each right before its B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from megatron.zero_bubble.planner.critical_paths import Ways
from megatron.zero_bubble.planner.event_loop import PlannedOrders
from megatron.zero_bubble.planner.problem import Order, Problem, tolerance


class _Drop(NamedTuple):
    """What a rank gains if one microbatch of one stage is without what R makes again, between its F and its B."""

    f: int
    """The position of F in the rank's order."""
    b: int
    room: float


def dropped_to_fit(problem: Problem, plan: PlannedOrders) -> list[Order] | None:
    """The orders of `plan`, which has no R, with the R that the limits demand; None if even that does not fit.

    Of what a rank holds where its limit is first exceeded, it drops what makes most room during all of the operations
    that exceed it.
    """
    ways = Ways(problem, plan.orders)
    orders = []
    for rank, lane in enumerate(ways.lanes):
        dropped = _dropped(ways, rank)
        if dropped is None:
            return None
        orders.append(list(_with_r(problem, lane, dropped)))
    return orders


def _dropped(ways: Ways, rank: int) -> set[int] | None:
    """Every F of the rank to drop the activations of; None if that is not enough."""
    lane, limit = ways.lanes[rank], ways.problem.limits[rank]
    changes = [ways.allocation[op] for op in lane]
    held = [after - min(0, change) for after, change in zip(accumulate(changes), changes, strict=True)]
    """Position -> what the rank holds while it runs that operation."""
    drops = list(_possible_drops(ways, rank))
    dropped = set()
    while exceeding := [position for position, amount in enumerate(held) if amount > limit + tolerance(limit)]:
        choices = [drop for drop in drops if drop.f <= exceeding[0] < drop.b]
        if not choices:
            return None
        chosen = max(choices, key=lambda drop: drop.room * sum(drop.f <= position < drop.b for position in exceeding))
        drops.remove(chosen)
        dropped.add(lane[chosen.f])
        for position in range(chosen.f, chosen.b):
            held[position] -= chosen.room
    return dropped


def _possible_drops(ways: Ways, rank: int) -> Iterator[_Drop]:
    """All that can be dropped: where B follows F at once, R would make again what is still there."""
    problem, lane = ways.problem, ways.lanes[rank]
    m, size = problem.num_microbatches, problem.num_stages
    for position, op in enumerate(lane):
        if op < size * m:
            drop = _Drop(position, ways.position[op + size * m], problem.footprints[op // m].restored)
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
