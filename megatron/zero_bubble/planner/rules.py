"""Rules for gaps and for memory, by which the ranks of the event loop decide."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule.recomputation import Recompute


class GapRule(Enum):
    """Whether an operation fills a gap that is shorter than it, and so delays the operation that ends the gap."""

    ALWAYS = "always"
    NEVER = "never"
    BALANCED = "balanced"
    """If leaving the gap would raise the longest span over all ranks (arXiv 2401.10241, section 3.1)."""


@dataclass(frozen=True)
class Keeping:
    """Which microbatches keep their activations, where a problem recomputes."""

    defers_weights: bool = False
    """Whether memory that waiting W's hold is left to them, so that F drops, or runs before them, if it has to."""
    drops: AbstractSet[tuple[int, int]] = frozenset()
    """(stage, microbatch) to drop in any case."""

    @classmethod
    def choices(cls, problem: Problem) -> tuple[Keeping, ...]:
        """The rules to try: one for a problem without recomputation, else several.

        Where the planner chooses, the first microbatch may be dropped in any case: its R runs before any B is there,
        and room for the R of later microbatches is kept from the beginning.
        """
        if not problem.recomputes:
            return (cls(),)
        if problem.recompute is Recompute.FULL:
            return cls(), cls(True)
        first = frozenset((stage, 0) for stage in range(problem.num_stages - 1))
        return cls(True, first), cls(), cls(True), cls(False, first)


KEEPS_WHAT_FITS = Keeping()
