"""Builds, ties and checkpoints the layers of one rank, splits their backward, and describes the layers of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.zero_bubble.pipeline.buffer_snapshot import renormalized
from megatron.zero_bubble.pipeline.dropped_layers import DroppingLayer
from megatron.zero_bubble.pipeline.layer_stage import HeldLayer
from megatron.zero_bubble.pipeline.options import PipelineOptions
from megatron.zero_bubble.pipeline.specs import LayerSpec, TiedLayerSpec, built, call_of, class_name_of, tie_of
from megatron.zero_bubble.pipeline.stage_layout import StageLayout
from megatron.zero_bubble.pipeline.weight_split import split_modules
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

Unsplit = Counter[str]
"""For each class of modules, the number of parameters whose gradients are computed in B and not in W."""


@dataclass(frozen=True)
class HeldLayers:
    """The layers of one rank."""

    chunks: list[list[HeldLayer]]
    """The layers of each model chunk."""
    tied: dict[str, dict[int, nn.Module]]
    """Key of a tied layer -> stage of this rank -> module with the tied layer's copy on the stage."""
    unsplit: Unsplit

    @property
    def layers(self) -> list[HeldLayer]:
        """All layers of the rank, in the order of the model."""
        return sorted((layer for chunk in self.chunks for layer in chunk), key=lambda layer: layer.index)


@dataclass(frozen=True)
class LayerBuilder:
    """Builds layers; `layers` and `options` have the same meaning as in `Pipeline`."""

    layers: Sequence[Any]
    device: torch.device
    store: WeightGradStore
    recomputation_store: RecomputationStore
    options: PipelineOptions

    def hold(self, layout: StageLayout, rank: int) -> HeldLayers:
        """Build the layers of the stages of `rank`.

        Raises:
            ValueError: a layer cannot be built, or has `max_norm` although `post_validation` is set.
        """
        chunks: list[list[HeldLayer]] = []
        tied: dict[str, dict[int, nn.Module]] = {}
        unsplit: Unsplit = Counter()
        for stage in layout.schedule.placement.stages_of(rank):
            chunk, copies = self._build(layout.layers_of(stage))
            chunks.append(chunk)
            unsplit += self._split(chunk)
            for key, module in copies.items():
                tied.setdefault(key, {})[stage] = module
        return HeldLayers(chunks, tied, unsplit)

    def _build(self, indices: Iterable[int]) -> tuple[list[HeldLayer], dict[str, nn.Module]]:
        """Build the layers of one stage; layers of the stage that are tied to each other are one module."""
        chunk: list[HeldLayer] = []
        copies: dict[str, nn.Module] = {}
        for index in indices:
            layer = self.layers[index]
            key = tie_of(layer)
            module = copies[key] if key in copies else built(self.layers, index, self.device)
            if key is not None:
                copies[key] = module
            for table in renormalized(module) if self.options.post_validation else ():
                raise ValueError(
                    f"post_validation=True: layer {index} ({class_name_of(layer)}) has max_norm={table.max_norm}, with "
                    "which forwards change weights, and they may run before the right step: leave one out"
                )
            call = call_of(layer, module)
            if self.options.checkpoint or (isinstance(layer, LayerSpec) and layer.checkpoint):
                call = DroppingLayer(call, self.recomputation_store, self.device)
            chunk.append(HeldLayer(index, class_name_of(layer), module, call))
        return chunk, copies

    def _split(self, chunk: Sequence[HeldLayer]) -> Unsplit:
        """Split the backward of a stage's layers, and count the parameters whose gradients stay in B."""
        # A tied layer need not call its module's forward.
        specs = ((layer, self.layers[layer.index]) for layer in chunk)
        called = {id(layer.module) for layer, spec in specs if isinstance(spec, TiedLayerSpec) and spec.forward}
        modules = [layer.module for layer in chunk if id(layer.module) not in called]
        split = {id(parameter) for parameter in split_modules(modules, self.store, self.options.split_layers)}
        return unsplit_of([layer.module for layer in chunk], split)


def unsplit_of(modules: Sequence[nn.Module], split: set[int]) -> Unsplit:
    """Count, for each class of modules, the parameters that require a gradient and are not in `split`."""
    counted, unsplit = set(split), Unsplit()
    for inside in nn.ModuleList(modules).modules():
        for parameter in inside.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in counted:
                counted.add(id(parameter))
                unsplit[type(inside).__name__] += parameter.numel()
    return unsplit


def stages_of_ties(layers: Sequence[Any], layout: StageLayout) -> dict[str, tuple[int, ...]]:
    """Return the stages of each tied layer, by the key of the layer."""
    stages_of: dict[str, tuple[int, ...]] = {}
    for stage in range(layout.schedule.num_stages):
        for key in {tie_of(layers[index]) for index in layout.layers_of(stage)} - {None}:
            assert key is not None
            stages_of[key] = (*stages_of.get(key, ()), stage)
    return dict(sorted(stages_of.items()))


@dataclass(frozen=True)
class Summary:
    """Partition and schedule of a pipeline, and the classes of layers whose weight gradients are computed in B."""

    layout: StageLayout
    num_microbatches: int
    unsplit: Unsplit
    """Module class -> number of parameters whose gradients are computed in B, on all ranks together."""
    num_parameters: int
    """The number of parameters of all ranks together."""

    def text(self) -> str:
        """Describe the partition, and list the layer classes whose W stays in B, with their share of the parameters."""
        schedule, placement = self.layout.schedule, self.layout.schedule.placement
        lines = [f"{schedule.name}, {placement.num_ranks} ranks, {self.num_microbatches} microbatches"]
        for stage in range(placement.num_stages):
            layers = self.layout.layers_of(stage)
            which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
            load = f"{self.layout.loads[stage]:g} {self.layout.unit}"
            lines.append(f"  stage {stage} on rank {placement.rank_of(stage)}: {which}, {load}")
        split = 1 - self.unsplit.total() / max(1, self.num_parameters)
        lines.append(f"  W is split off for {split:.1%} of the parameters")
        lines += [f"  W stays in B: {name}, {share} of the parameters" for name, share in self._unsplit_shares()]
        return "\n".join(lines)

    def notice(self) -> str | None:
        """Return one line on the layers whose W stays in B; None if there are no such layers."""
        shares = ", ".join(f"{name} ({share} of the parameters)" for name, share in self._unsplit_shares())
        return f"Pipeline: W stays in B for {shares}; split_layers=[...] splits more" if shares else None

    def _unsplit_shares(self) -> list[tuple[str, str]]:
        """Return each class whose W stays in B, with its share of the parameters, the largest share first."""
        return [(name, f"{count / self.num_parameters:.1%}") for name, count in self.unsplit.most_common()]
