"""Chooses numbers of layer groups to try for recomputation in each stage, under the memory limits of the ranks."""

from __future__ import annotations

from dataclasses import replace

from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.request import tolerance
from megatron.zero_bubble.schedule.block_groups import in_groups

SHORT = 2
"""Several layer groups are tried on ranks that cannot keep all activations of this number of microbatches."""

Groups = tuple[int, ...]
"""Stage -> number of groups of layers, as in `Schedule`; empty if every stage has one group."""


def groupings(problem: Problem) -> list[Groups]:
    """Numbers of layer groups to try for each stage, the fewest groups first.

    With more groups of layers, a stage takes less memory, but its B takes longer. With more groups, the B includes more
    of the stage's recomputation and weight gradients, and the previous stage waits for the B. On a rank that is not
    short of memory, each stage has one group of layers.

    Args:
        problem: a problem with memory limits.

    Returns:
        Tuples with the number of layer groups of each stage. If the stages fit in memory with the largest numbers of
        groups, the stages fit with every returned tuple.
    """
    costs = problem.costs
    blocks = [max(1, costs.blocks(stage)) for stage in range(costs.num_stages)]
    if not problem.recomputes or max(blocks) == 1:
        return [()]
    levels = [*(2**power for power in range((max(blocks) - 1).bit_length())), max(blocks)]
    needed = {
        level: replace(problem, costs=in_groups(costs, [min(level, most) for most in blocks])).smallest_limits
        for level in levels
    }
    least = [
        next((level for level in levels if needed[level][rank] <= limit + tolerance(limit)), levels[-1])
        for rank, limit in enumerate(problem.limits)
    ]
    is_short = [limit < SHORT * whole for limit, whole in zip(problem.limits, problem.whole_memory, strict=True)]
    tried = []
    for level in levels:
        of_rank = [max(fewest, level if short else 1) for fewest, short in zip(least, is_short, strict=True)]
        groups = tuple(min(of_rank[rank], most) for rank, most in zip(problem.rank_of, blocks, strict=True))
        tried.append(groups if max(groups) > 1 else ())
    return list(dict.fromkeys(tried))
