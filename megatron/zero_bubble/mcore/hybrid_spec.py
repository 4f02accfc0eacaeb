"""The spec of a hybrid model with megatron-core's own layers; megatron-core's hybrid specs use Transformer Engine.

    pretrain_hybrid.py --spec megatron.zero_bubble.mcore.hybrid_spec stack_spec --transformer-impl local

`stack_spec` contains every kind of layer in `LOCAL_LAYERS`, and multi-token prediction, as far as the installed
megatron-core has them. On a CPU, `cpu.py` replaces the kernels of Mamba and of gated delta nets, and the norm after the
last layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_token_prediction
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.zero_bubble.mcore.attention import LocalAttention
from megatron.zero_bubble.mcore.decoder_models import HYBRID_RECOMPUTES, STACK_MODULE
from megatron.zero_bubble.mcore.layer_spec import LocalNorm, allow_local_latent_attention

_SOME = 8
"""An arbitrary number of experts. megatron-core returns the spec of a layer with experts if the number of experts is
not None, whatever the number is."""
LOCAL_LAYERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "*": ("attention_layer", "attention"),
        "-": ("mlp_layer", "an MLP"),
        "E": ("moe_layer", "experts"),
        "M": ("mamba_layer", "Mamba"),
        "G": ("gdn_layer", "a gated delta net"),
        "+": ("mla_layer", "latent attention"),
    }
)
"""Symbol in a layer pattern -> (name of the kind of layer in megatron-core's specs, name of the kind in words)."""
_SPARSE = "dsa_layer"
"""Name of sparse attention layers in megatron-core's specs; their symbol in a layer pattern is `D`."""


def local_layers() -> dict[str, str]:
    """Return the local layers that this megatron-core has, as a dictionary from layer-pattern symbol to layer name."""
    return {symbol: words for symbol, (name, words) in LOCAL_LAYERS.items() if name in _SUBMODULES.__dataclass_fields__}


class NoSparseAttention:
    """Refuses to build sparse attention, which no layer without Transformer Engine supports."""

    def __init__(self, *args: Any, config: TransformerConfig, **unused: Any) -> None:
        known = ", ".join(f"{symbol} ({words})" for symbol, words in local_layers().items())
        raise ValueError(
            "--hybrid-layer-pattern: local layers have no sparse attention (D), which multiplies with weights outside "
            f"of linear layers, so that W could not compute their gradients; the local layers are {known}"
        )


_BLOCKS = importlib.import_module(STACK_MODULE)
_NAME = "HybridStack" if hasattr(_BLOCKS, "HybridStack") else "MambaStack"
_STACK, _SUBMODULES = getattr(_BLOCKS, _NAME), getattr(_BLOCKS, f"{_NAME}Submodules")
HAS_FURTHER = "mtp_block_spec" in _SUBMODULES.__dataclass_fields__
"""Whether hybrid models of the installed megatron-core support multi-token prediction (0.17 and later)."""


def local_spec(attention: type[torch.nn.Module] = LocalAttention) -> ModuleSpec:
    """Return the spec of a stack of megatron-core's own layers.

    Args:
        attention: the class of the module that computes attention; by default megatron-core's unfused attention.
    """
    dense, expert = (get_gpt_layer_local_spec(num_experts=number).submodules for number in (None, _SOME))
    latent = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    allow_local_latent_attention()
    for spec in (dense.self_attention, latent):
        spec.submodules.core_attention = attention
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=LocalNorm, out_proj=RowParallelLinear
        ),
    )
    mixer = ModuleSpec(
        module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    )
    # The layer pattern of the model describes the inner layers of multi-token prediction.
    further = multi_token_prediction.MultiTokenPredictionLayerSubmodules(
        enorm=LocalNorm, hnorm=LocalNorm, eh_proj=ColumnParallelLinear, layer_norm=LocalNorm
    )
    further_layers = [ModuleSpec(module=multi_token_prediction.MultiTokenPredictionLayer, submodules=further)]
    attentions = {"attention_layer": dense.self_attention, "mla_layer": latent, "gdn_layer": delta_net}
    attends = {"input_layernorm": LocalNorm, "self_attn_bda": get_bias_dropout_add}
    layers: dict[str, Any] = {
        **{name: _layer(TransformerLayer, self_attention=part, **attends) for name, part in attentions.items()},
        _SPARSE: NoSparseAttention,
        "mlp_layer": _layer(MLPLayer, pre_mlp_layernorm=LocalNorm, mlp=dense.mlp, mlp_bda=dense.mlp_bda),
        "moe_layer": _layer(TransformerLayer, pre_mlp_layernorm=LocalNorm, mlp=expert.mlp, mlp_bda=expert.mlp_bda),
        "mamba_layer": ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(norm=LocalNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
        ),
        "mtp_block_spec": ModuleSpec(
            module=multi_token_prediction.MultiTokenPredictionBlock,
            submodules=multi_token_prediction.MultiTokenPredictionBlockSubmodules(layer_specs=further_layers),
        ),
    }
    known = {name: layer for name, layer in layers.items() if name in _SUBMODULES.__dataclass_fields__}
    return ModuleSpec(module=_STACK, submodules=_SUBMODULES(**known))


def _layer(module: type[torch.nn.Module], **parts: Any) -> ModuleSpec:
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))


def transformer_engine_spec() -> ModuleSpec:
    """Return megatron-core's spec of a stack of Transformer Engine's layers."""
    kind = "hybrid" if HYBRID_RECOMPUTES else "mamba"
    return getattr(importlib.import_module(f"megatron.core.models.{kind}.{kind}_layer_specs"), f"{kind}_stack_spec")


stack_spec = local_spec()
"""The spec for the flag `--spec`, which takes a module and the name of a spec in the module."""
