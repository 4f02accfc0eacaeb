"""The memory that one microbatch holds on a stage, from its forward to its weight gradients."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.schedule.costs import StageCosts


@dataclass(frozen=True)
class Footprint:
    """Memory of one microbatch on a stage, which never grows after the start of F, or of R if it has one.

    The memory that a B or W allocates is reserved when F starts, or R. A planner that checks memory at F and R alone
    can then always finish a microbatch.
    """

    dropped: float
    """Memory from the start of F to the start of R, if there is an R."""
    whole: float
    """Memory from the start of F, or of R, to the end of B."""
    after_b: float
    """Memory from the end of B to the end of W."""
    after_w: float
    """Memory from the end of W on: zero, unless W releases less than F and B took."""

    @classmethod
    def of(cls, costs: StageCosts, stage: int) -> Footprint:
        after_f = costs.memory_f[stage]
        after_b = after_f + costs.memory_b[stage]
        after_w = after_b + costs.memory_w[stage]
        dropped = max(after_f - costs.memory_r[stage], 0)
        return cls(dropped, max(after_f, after_b, after_w, 0), max(after_b, after_w, 0), max(after_w, 0))

    @property
    def restored(self) -> float:
        """Memory that R allocates."""
        return self.whole - self.dropped
