"""Builds the specs of megatron-core's layers.

Layers without Transformer Engine ("local" layers) get features that megatron-core has only with Transformer Engine or
apex.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron.zero_bubble.mcore.attention import core_attention


class LayerNorm1p(torch.nn.LayerNorm):
    """A LayerNorm that stores its weight's difference from 1."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(hidden, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class RMSNorm1p(torch.nn.RMSNorm):
    """An RMSNorm that stores its weight's difference from 1."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, self.normalized_shape, self.weight + 1, self.eps)


_NORMS = {
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("RMSNorm", False): torch.nn.RMSNorm,
    ("LayerNorm", True): LayerNorm1p,
    ("RMSNorm", True): RMSNorm1p,
}


_NORMS_IN_ATTENTION = {"q_layernorm", "k_layernorm", "kv_layernorm"}


class LocalNorm:
    """A normalization layer of torch, for settings that megatron-core's own wrapper of torch's norms refuses.

    megatron-core's wrapper refuses weights stored as differences from 1 (`--apply-layernorm-1p`) and sequence
    parallelism. Under sequence parallelism, each tensor-parallel rank normalizes its slice of the sequence, so the
    gradients of the norm's parameters are partial. The norm's parameters are marked `sequence_parallel`, so that
    megatron-core sums the gradients of the norm's parameters over the tensor-parallel ranks at the end of a step.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        norm = _NORMS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps=eps)
        if config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
        return norm


def _needs_local_norm(config: TransformerConfig) -> bool:
    is_local = config.transformer_impl == "local"
    return is_local and (config.sequence_parallel or config.layernorm_zero_centered_gamma)


def allow_local_latent_attention() -> None:
    """Let megatron-core build latent attention where Transformer Engine is not installed.

    Older versions of megatron-core, such as 0.16, test only whether megatron-core's own module `transformer_engine` can
    be imported. This import succeeds even if Transformer Engine is not installed.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def layer_specs(config: TransformerConfig, *, uses_torch_attention: bool) -> list[ModuleSpec]:
    """Return the specs of all layers of the model; layers that are alike share one spec.

    Args:
        uses_torch_attention: whether layers without Transformer Engine use torch's fused attention kernels.
    """
    is_local = config.transformer_impl == "local"
    layers = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=not is_local,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    if not is_local:
        return layers
    allow_local_latent_attention()
    attention = core_attention(config, uses_torch=uses_torch_attention)
    distinct = {id(layer): _completed_local_layer(config, layer, attention) for layer in layers}
    return [distinct[id(layer)] for layer in layers]


def _completed_local_layer(
    config: TransformerConfig, layer: ModuleSpec, attention: type[torch.nn.Module]
) -> ModuleSpec:
    """Return a copy of the spec `layer` that uses the module `attention`, and `LocalNorm` if `config` requires it."""
    layer = copy.deepcopy(layer)
    inside = layer.submodules.self_attention.submodules
    inside.core_attention = attention
    if _needs_local_norm(config):
        layer.submodules.input_layernorm = LocalNorm
        layer.submodules.pre_mlp_layernorm = LocalNorm
        if config.qk_layernorm and not getattr(config, "qk_l2_norm", False):
            for name in _NORMS_IN_ATTENTION & vars(inside).keys():
                setattr(inside, name, LocalNorm)
    return layer


def block_spec(
    config: TransformerConfig, layers: Sequence[ModuleSpec], vp_stage: int | None, pp_rank: int
) -> TransformerBlockSubmodules:
    """Return the spec of one model chunk's decoder, which has the chunk's share of the model's layers."""
    layout: Any = config.pipeline_model_parallel_layout
    if layout is not None:
        # A `PlacedLayout` has its own rank; in a V, `pp_rank` is the rank to which megatron-core assigns the stage.
        chosen = layout.get_layer_id_list(vp_stage=vp_stage)
    else:
        start = get_transformer_layer_offset(config, vp_stage, pp_rank)
        chosen = range(start, start + get_num_layers_to_build(config, vp_stage, pp_rank))
    norm = LocalNorm if _needs_local_norm(config) else LayerNormImpl
    return TransformerBlockSubmodules(layer_specs=[layers[index] for index in chosen], layer_norm=norm)


def multi_token_spec(
    config: TransformerConfig, layer: ModuleSpec, vp_stage: int | None, *, is_last_stage: bool
) -> Any | None:
    """Return the spec of the multi-token prediction layers; None for a stage without multi-token prediction.

    Each multi-token prediction layer contains a transformer layer with the spec `layer`.

    Raises:
        ValueError: the layout puts layers of multi-token prediction on a stage other than the last.
    """
    if not config.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(config, layer, config.transformer_impl != "local", vp_stage)
    if (spec is not None) != is_last_stage:
        raise ValueError("the layers of --mtp-num-layers must be on the last stage, beside the loss")
    if spec is None or not _needs_local_norm(config):
        return spec
    spec = copy.deepcopy(spec)
    for layer in spec.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(layer.submodules, name, LocalNorm)
    return spec
