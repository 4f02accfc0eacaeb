"""Tells a user which layers each stage has, and whose weight gradients stay in B."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.pipeline.held_layers import Unsplit
from megatron.zero_bubble.pipeline.stage_layout import StageLayout


@dataclass(frozen=True)
class Summary:
    """Partition and schedule of a pipeline, and the layers without split."""

    layout: StageLayout
    num_microbatches: int
    unsplit: Unsplit
    """The parameters of all ranks whose W stays in B, counted by class of layer."""
    num_parameters: int
    """The number of all ranks' parameters."""

    @property
    def unsplit_share(self) -> float:
        """The share of the model's parameters whose gradients are computed in B."""
        return self.unsplit.total() / max(1, self.num_parameters)

    def text(self) -> str:
        """Describe the partition, and list the layers whose W stays in B with their share of the parameters."""
        schedule, placement = self.layout.schedule, self.layout.schedule.placement
        lines = [f"{schedule.name}, {placement.num_ranks} ranks, {self.num_microbatches} microbatches"]
        for stage in range(placement.num_stages):
            layers = self.layout.layers_of(stage)
            which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
            load = f"{self.layout.loads[stage]:g} {self.layout.unit}"
            lines.append(f"  stage {stage} on rank {placement.rank_of(stage)}: {which}, {load}")
        lines.append(f"  W is split off for {1 - self.unsplit_share:.1%} of the parameters")
        lines += [f"  W stays in B: {name}, {share} of the parameters" for name, share in self._unsplit_shares()]
        return "\n".join(lines)

    def notice(self) -> str | None:
        """Return one line on the layers whose W stays in B, None if there are none."""
        shares = ", ".join(f"{name} ({share} of the parameters)" for name, share in self._unsplit_shares())
        return f"Pipeline: W stays in B for {shares}; split_layers=[...] splits more" if shares else None

    def _unsplit_shares(self) -> list[tuple[str, str]]:
        """Return class and share of the layers whose W stays in B, the largest first."""
        return [(name, f"{count / self.num_parameters:.1%}") for name, count in self.unsplit.most_common()]
