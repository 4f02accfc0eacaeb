"""Chooses in how many groups of layers each stage restores what it recomputes, within a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.zero_bubble.planner.problem import Problem, tolerance

SHORT = 2
"""A rank with room for so many microbatches restored in full gains nothing from groups: while one is in its B, the next
one's R has room."""

Groups = tuple[int, ...]
"""Stage -> groups of layers, as in `Schedule`; empty for one everywhere."""


def groupings(problem: Problem) -> list[Groups]:
    """The numbers of groups to try, from the fewest that fit on every rank on.

    More groups take less memory, and more of their recomputation and of their weight gradients is in B, which the stage
    before waits for. A rank that is not short of memory has one.
    """
    costs = problem.costs
    blocks = [max(1, costs.blocks(stage)) for stage in range(costs.num_stages)]
    if not problem.recomputes or max(blocks) == 1:
        return [()]
    levels = list(_levels(max(blocks)))
    needed = {
        level: replace(problem, costs=costs.in_groups([min(level, most) for most in blocks])).smallest_limits
        for level in levels
    }
    least = [
        next((level for level in levels if needed[level][rank] <= limit + tolerance(limit)), levels[-1])
        for rank, limit in enumerate(problem.limits)
    ]
    whole = problem.placement.sums([footprint.whole for footprint in problem.footprints])
    is_short = [limit < SHORT * memory for limit, memory in zip(problem.limits, whole, strict=True)]
    tried = []
    for level in levels:
        of_rank = [max(fewest, level if short else 1) for fewest, short in zip(least, is_short, strict=True)]
        groups = tuple(min(of_rank[rank], most) for rank, most in zip(problem.rank_of, blocks, strict=True))
        tried.append(groups if max(groups) > 1 else ())
    return list(dict.fromkeys(tried))


def _levels(most: int) -> Iterator[int]:
    """The powers of two below `most`, and `most`."""
    level = 1
    while level < most:
        yield level
        level *= 2
    yield most
