"""Rules of scheduling policies: which operations fill idle gaps, and which microbatches drop their activations."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule.recomputation import Recompute


class GapRule(Enum):
    """Whether an operation may run in an idle gap shorter than the operation, and so delay the next operation."""

    ALWAYS = "always"
    NEVER = "never"
    BALANCED = "balanced"
    """The operation runs only if the gap would raise the longest span of a rank (arXiv 2401.10241, section 3.1)."""


@dataclass(frozen=True)
class Keeping:
    """The choice of microbatches that keep their activations, in a problem with recomputation."""

    defers_weights: bool = False
    """Whether an F that lacks memory drops its activations, instead of waiting for a W to release memory."""
    drops: AbstractSet[tuple[int, int]] = frozenset()
    """(stage, microbatch) of activations that are dropped even if they fit in memory."""
    most_dropped: int | None = None
    """Number n: only the first n and the last n microbatches may drop their activations; None for all microbatches."""

    @classmethod
    def choices(cls, problem: Problem) -> tuple[Keeping, ...]:
        """The rules to try for dropping activations: a single rule if no microbatch may be recomputed.

        With `Recompute.PLANNED` some rules drop the activations of the first microbatch. The R (recomputation) of the
        first microbatch can run before any B is ready, and a later R can reuse the memory that this R allocates. One
        rule drops activations only in the warmup and in the cooldown, where ranks idle.
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
