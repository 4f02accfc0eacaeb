"""Builds the layers of one rank, and describes how the layers of the model are partitioned among all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.zero_bubble.pipeline.dropped_layers import DroppingLayer
from megatron.zero_bubble.pipeline.failures import failing_as
from megatron.zero_bubble.pipeline.forward_state import renormalized
from megatron.zero_bubble.pipeline.layer_stage import HeldLayer
from megatron.zero_bubble.pipeline.options import PipelineOptions
from megatron.zero_bubble.pipeline.specs import LayerSpec, TiedLayerSpec, call_of, class_name_of, module_of, tie_of
from megatron.zero_bubble.pipeline.stage_layout import StageLayout
from megatron.zero_bubble.pipeline.weight_split import split_modules
from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

Unsplit = Counter[str]
"""Name of a module class -> number of the modules' parameters whose gradients are computed in B and not in W."""


@dataclass(frozen=True)
class HeldLayers:
    """The layers of one rank, with their modules."""

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
    """Builds the layers of a rank; `layers` and `options` are the arguments of `Pipeline` with these names."""

    layers: Sequence[Any]
    device: torch.device
    store: WeightGradStore
    recomputation_store: RecomputationStore
    options: PipelineOptions

    def hold(self, layout: StageLayout, rank: int) -> HeldLayers:
        """Build the layers of the stages of `rank`.

        Raises:
            ValueError: a layer cannot be built or moved to the device, or, with `post_validation`, a layer has an
                embedding with `max_norm`.
        """
        chunks: list[list[HeldLayer]] = []
        tied: dict[str, dict[int, nn.Module]] = defaultdict(dict)
        unsplit: Unsplit = Counter()
        for stage in layout.schedule.placement.stages_of(rank):
            chunks.append([self._hold_layer(index, stage, tied) for index in layout.layers_of(stage)])
            unsplit += self._split(chunks[-1])
        return HeldLayers(chunks, tied, unsplit)

    def _hold_layer(self, index: int, stage: int, tied: dict[str, dict[int, nn.Module]]) -> HeldLayer:
        layer = self.layers[index]
        module = self._module(index, stage, tied)
        for table in renormalized(module) if self.options.post_validation else ():
            raise ValueError(
                f"post_validation=True: layer {index} ({class_name_of(layer)}) has max_norm={table.max_norm}, with "
                "which a forward changes weights, but post-validation repeats forwards: leave one out"
            )
        call = call_of(layer, module)
        if self.options.checkpoint or (isinstance(layer, LayerSpec) and layer.checkpoint):
            call = DroppingLayer(call, module, self.recomputation_store, self.device)
        return HeldLayer(index, class_name_of(layer), module, call)

    def _module(self, index: int, stage: int, tied: dict[str, dict[int, nn.Module]]) -> nn.Module:
        """Return the module of layer `index`; tied layers with the same key share one module on each stage."""
        key = tie_of(self.layers[index])
        if key is not None and stage in tied[key]:
            return tied[key][stage]
        module = module_of(self.layers, index, self.device)
        with failing_as(f"layer {index} ({class_name_of(self.layers[index])})"):
            module = module.to(self.device)
        if key is not None:
            tied[key][stage] = module
        return module

    def _split(self, chunk: Sequence[HeldLayer]) -> Unsplit:
        """Split the backward of a stage's layers into B and W; count the parameters whose gradients stay in B."""
        # A tied layer need not call its module's forward.
        specs = ((layer, self.layers[layer.index]) for layer in chunk)
        called = {id(layer.module) for layer, spec in specs if isinstance(spec, TiedLayerSpec) and spec.forward}
        modules = [layer.module for layer in chunk if id(layer.module) not in called]
        counted, unsplit = set(split_modules(modules, self.store, self.options.split_layers)), Unsplit()
        for inside in nn.ModuleList(layer.module for layer in chunk).modules():
            for parameter in inside.parameters(recurse=False):
                if parameter.requires_grad and parameter not in counted:
                    counted.add(parameter)
                    unsplit[type(inside).__name__] += parameter.numel()
        return unsplit


@dataclass(frozen=True)
class Summary:
    """The partition and the schedule of a pipeline, and the classes of modules whose weight gradients B computes."""

    layout: StageLayout
    unsplit: Unsplit
    """Name of a module class -> number of parameters on all ranks whose gradients are computed in B."""
    num_parameters: int
    """The number of parameters of all ranks together."""

    def text(self) -> str:
        """Return a text about the partition of layers and about the module classes whose weight gradients B computes.

        For each module class, the text gives the number of parameters whose gradients B computes, as a percentage of
        all parameters of the model.
        """
        schedule, placement = self.layout.schedule, self.layout.schedule.placement
        lines = [f"{schedule.name}, {placement.num_ranks} ranks, {schedule.num_microbatches} microbatches"]
        for stage in range(placement.num_stages):
            layers = self.layout.layers_of(stage)
            layer_range = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
            load = f"{self.layout.loads[stage]:g} {self.layout.unit}"
            lines.append(f"  stage {stage} on rank {placement.rank_of(stage)}: {layer_range}, {load}")
        split = 1 - self.unsplit.total() / max(1, self.num_parameters)
        lines.append(f"  W is split off for {split:.1%} of the parameters")
        lines += [f"  W stays in B: {name}, {share} of the parameters" for name, share in self._unsplit_shares()]
        return "\n".join(lines)

    def notice(self) -> str | None:
        """Return a line with the module classes whose weight gradients B computes; None if there is no such class."""
        shares = ", ".join(f"{name} ({share} of the parameters)" for name, share in self._unsplit_shares())
        return f"Pipeline: W stays in B for {shares}; split_layers=[...] splits more" if shares else None

    def _unsplit_shares(self) -> list[tuple[str, str]]:
        """Return pairs (module class, share of all parameters) for classes whose weight gradients B computes."""
        return [(name, f"{count / self.num_parameters:.1%}") for name, count in self.unsplit.most_common()]
