"""The extent of a search for a layout: placements, the number of planned layouts, and the effort for each layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.zero_bubble.planner.request import QUICK_EFFORT, PlanRequest
from megatron.zero_bubble.schedule.ir import Placement

CHUNKS = (2, 3, 4)
"""Numbers of model chunks per rank that are always tried for interleaved placements."""
MORE_CHUNKS = (5, 6, 8, 10, 12, 16)
"""Numbers of model chunks per rank to try in order, while each number speeds up the plan (see `search_layouts`)."""
PROMISING = 1.05
"""A layout is planned again, with more effort, if its plan is slower than the fastest plan by at most this factor."""
_SMALL = 3000
"""A problem counts as small (see `Extent.is_small`) if it has at most this many F, B and W with two chunks per rank."""
_LARGE = 5000
"""With this many F, B and W (for two chunks per rank) or more, a search above `QUICK_EFFORT` has only one round."""
_MOST_MOVES = 6
"""Largest number of partitions that are planned for a layout after its first partition."""
_MOVED_OPERATIONS = 20_000
"""Largest total number of F, B and W in the plans of a layout's later partitions; one such plan is always allowed."""


def all_placements(num_ranks: int, num_layers: int = 0) -> tuple[Placement, ...]:
    """All placements that `search_layouts` tries by default.

    Args:
        num_ranks: pipeline ranks.
        num_layers: number of layers; with more than 4 chunks per rank, each stage but the first and last needs a layer.
    """
    more = (chunks for chunks in MORE_CHUNKS if num_ranks * chunks <= num_layers + 2)
    interleaved = (Placement("interleaved", num_ranks, chunks) for chunks in (*CHUNKS, *more))
    return (Placement("linear", num_ranks), Placement("v", num_ranks, 2), *interleaved)


@dataclass(frozen=True)
class Extent:
    """The number of layouts that a search plans, and the effort for each layout.

    Attributes:
        rounds: (number of layouts, largest effort for each layout) of each round of planning.
        promising: a layout is planned with more effort if its plan takes at most `promising` times the shortest time.
        num_moved: largest number of layouts whose layers are moved to other stages; the fastest layouts are taken.
        worth_moving: layers of a layout are moved to other stages if its plan takes at most `worth_moving` times the
            shortest time.
        is_small: whether the problem is small. In a small problem, layouts that differ only in recomputation count as
            different layouts.
    """

    rounds: tuple[tuple[int, int], ...]
    promising: float = PROMISING
    num_moved: int = 4
    worth_moving: float = PROMISING
    is_small: bool = False


# `worth_moving` is large because a plan can become much faster if one layer leaves the rank that lacks memory.
_OF_SMALL = Extent(((12, 30_000), (3, 150_000)), PROMISING**2, num_moved=8, worth_moving=1.5, is_small=True)
_QUICK_OF_SMALL = replace(_OF_SMALL, rounds=((12, 5_000), (3, 25_000)))


def extent_of(request: PlanRequest) -> Extent:
    """The extent of the search for a request; fewer layouts are planned for larger problems."""
    num_operations = 6 * request.num_ranks * request.num_microbatches
    if num_operations <= _SMALL:
        return _QUICK_OF_SMALL if request.effort <= QUICK_EFFORT else _OF_SMALL
    if request.effort <= QUICK_EFFORT:
        return Extent(((3, 10_000), (1, QUICK_EFFORT)))
    return Extent(((3, 60_000), (1, 150_000)) if num_operations < _LARGE else ((3, 100_000),))


def most_moves(request: PlanRequest, placement: Placement) -> int:
    """Largest number of partitions to plan for a layout with the given placement, besides the first partition."""
    num_operations = 3 * placement.num_stages * request.num_microbatches
    return max(1, min(_MOST_MOVES, _MOVED_OPERATIONS // num_operations))
