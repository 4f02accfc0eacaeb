"""The memory of one microbatch on a stage, from its forward to its weight gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.schedule.costs import StageCosts


@dataclass(frozen=True)
class Footprint:
    """Memory of one microbatch on a stage, under the assumption that only F and R allocate memory.

    The memory that B and W of a microbatch allocate is reserved when F starts, or when R starts if the microbatch has
    an R (recomputation). A planner checks the memory limit only at F and R, because the memory of B and W is already
    reserved. After its F and its R, a microbatch can run its B and W without further memory.
    """

    dropped: float
    """Memory of a microbatch from the start of its F to the start of its R (recomputation)."""
    whole: float
    """Memory of a microbatch from the start of its R (recomputation), or of its F without R, to the end of its B."""
    after_b: float
    """Memory of a microbatch from the end of its B to the end of its W."""
    after_w: float
    """Memory of a microbatch after the end of its W: zero, unless W releases less than F and B have allocated."""

    @classmethod
    def of(cls, costs: StageCosts, stage: int) -> Footprint:
        after_f = costs.memory_f[stage]
        after_b = after_f + costs.memory_b[stage]
        after_w = after_b + costs.memory_w[stage]
        dropped = max(after_f - costs.memory_r[stage], 0)
        return cls(dropped, max(after_f, after_b, after_w, 0), max(after_b, after_w, 0), max(after_w, 0))

    @property
    def restored(self) -> float:
        """Memory that a recomputation (R) allocates."""
        return self.whole - self.dropped
