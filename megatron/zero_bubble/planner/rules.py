"""Rules for gaps and for memory, which the policies of the event loop follow."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule.recomputation import Recompute


class GapRule(Enum):
    """Whether an operation fills a gap that is too short for it, and so delays the operation after the gap."""

    ALWAYS = "always"
    NEVER = "never"
    BALANCED = "balanced"
    """The gap is filled only if idling would raise the longest span of a rank (arXiv 2401.10241, section 3.1)."""


@dataclass(frozen=True)
class Keeping:
    """Which microbatches keep their activations, in a problem with recomputation."""

    defers_weights: bool = False
    """Whether an F drops its activations rather than wait for a W to release memory."""
    drops: AbstractSet[tuple[int, int]] = frozenset()
    """(stage, microbatch) of the activations that are dropped in any case."""
    most_dropped: int | None = None
    """Number of first microbatches, and of last microbatches, that may drop their activations; None if all may."""

    @classmethod
    def choices(cls, problem: Problem) -> tuple[Keeping, ...]:
        """The rules to try for dropping activations: one rule if no microbatch may have an R, otherwise several rules.

        With `Recompute.PLANNED` some rules drop the activations of the first microbatch, because R of the first
        microbatch can run before any B is ready, and every later R can reuse the memory of this R. One rule drops
        activations only in the warmup and in the cooldown, where ranks wait.
        """
        if not problem.recomputes:
            return (cls(),)
        if problem.recompute is Recompute.FULL:
            return cls(), cls(True)
        first = frozenset((stage, 0) for stage in range(problem.num_stages - 1))
        return cls(True, first), cls(), cls(True), cls(False, first), cls(True, first, max(1, problem.num_ranks // 2))

    def may_drop(self, microbatch: int, num_microbatches: int) -> bool:
        """Whether a microbatch may drop its activations."""
        most = num_microbatches if self.most_dropped is None else self.most_dropped
        return microbatch < most or microbatch >= num_microbatches - most


KEEPS_WHAT_FITS = Keeping()
