"""Specs of megatron-core's layers; local layers get what megatron-core has only with Transformer Engine or apex."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

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


class LocalNorm:
    """One of torch's norms with the settings that megatron-core's own wrapper of them refuses.

    These are weights around zero (`--apply-layernorm-1p`) and sequence parallelism, where each tensor-parallel rank
    normalises its slice of the sequence: the parameters are marked `sequence_parallel`, because their gradients are
    partial, and megatron-core sums the gradients of marked parameters over the ranks at the end of a step.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        norm = _NORMS[config.normalization, config.layernorm_zero_centered_gamma](hidden_size, eps=eps)
        if config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
        return norm


def _needs_local_norm(config: TransformerConfig) -> bool:
    return config.sequence_parallel or config.layernorm_zero_centered_gamma


def layer_spec(config: TransformerConfig, transformer_impl: str, *, uses_torch_attention: bool) -> ModuleSpec:
    """Return the spec of one layer.

    Args:
        transformer_impl: `local` or `transformer_engine`.
        uses_torch_attention: whether local layers attend through torch's fused kernels.
    """
    grouped = config.moe_grouped_gemm
    if transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=grouped)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=grouped, normalization=config.normalization
    )
    layer = copy.deepcopy(layer)
    attention = core_attention(config, uses_torch=uses_torch_attention)
    layer.submodules.self_attention.submodules.core_attention = attention
    if _needs_local_norm(config):
        layer.submodules.input_layernorm = LocalNorm
        layer.submodules.pre_mlp_layernorm = LocalNorm
    return layer


def block_spec(
    config: TransformerConfig, layer: ModuleSpec, transformer_impl: str, vp_stage: int | None, pp_rank: int
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the spec of one model chunk's decoder, whose layers have the spec `layer`."""
    if transformer_impl == "transformer_engine" or not _needs_local_norm(config):
        return layer
    num_layers = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=LocalNorm)


def multi_token_spec(
    config: TransformerConfig,
    layer: ModuleSpec,
    transformer_impl: str,
    vp_stage: int | None,
    *,
    is_last_stage: bool,
) -> Any | None:
    """Return the spec of the multi-token prediction layers, built like `layer`; None if the stage has none.

    Raises:
        ValueError: the layout puts them on another stage than the last.
    """
    if not config.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(config, layer, transformer_impl == "transformer_engine", vp_stage)
    if (spec is not None) != is_last_stage:
        raise ValueError("the layers of --mtp-num-layers must be on the last stage, beside the loss")
    if spec is None or not _needs_local_norm(config) or transformer_impl == "transformer_engine":
        return spec
    spec = copy.deepcopy(spec)
    for layer in spec.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(layer.submodules, name, LocalNorm)
    return spec
