"""The spec of a hybrid model with megatron-core's own layers; all of megatron-core's specs have Transformer Engine's.

    pretrain_hybrid.py --spec megatron.zero_bubble.mcore.hybrid_spec stack_spec --transformer-impl local

It has attention (`*`), MLPs (`-`), experts (`E`), Mamba (`M`) and multi-token prediction. On a CPU, Mamba's kernels and
the norm after the last layer are those that `cpu.py` substitutes.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.zero_bubble.mcore.decoder_models import HYBRID_RECOMPUTES, STACK_MODULE, mamba_mixer
from megatron.zero_bubble.mcore.layer_spec import LocalNorm

_SOME = 8
"""A number of experts: any but None makes the spec of a layer with experts."""


def _further() -> ModuleSpec:
    """Return the spec of multi-token prediction, whose inner layers a pattern describes."""
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=LocalNorm, hnorm=LocalNorm, eh_proj=ColumnParallelLinear, layer_norm=LocalNorm
    )
    layers = [ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)]
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    )


def local_spec(attention: type[torch.nn.Module] | None = None) -> ModuleSpec:
    """Return the spec of a stack of megatron-core's own layers.

    Args:
        attention: the module that computes attention; megatron-core's own by default.
    """
    dense, expert = (get_gpt_layer_local_spec(num_experts=number).submodules for number in (None, _SOME))
    if attention is not None:
        dense.self_attention.submodules.core_attention = attention
    layers: dict[str, Any] = {
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=LocalNorm, self_attention=dense.self_attention, self_attn_bda=dense.self_attn_bda
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=LocalNorm, mlp=dense.mlp, mlp_bda=dense.mlp_bda),
        ),
        "moe_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=LocalNorm, mlp=expert.mlp, mlp_bda=expert.mlp_bda),
        ),
    }
    if (module := mamba_mixer()) is not None:
        projections = module.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
        mixer = ModuleSpec(module=module.MambaMixer, submodules=projections)
        layers["mamba_layer"] = ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(norm=LocalNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
        )
    blocks = importlib.import_module(STACK_MODULE)
    stack, submodules = (
        (blocks.HybridStack, blocks.HybridStackSubmodules)
        if hasattr(blocks, "HybridStack")
        else (blocks.MambaStack, blocks.MambaStackSubmodules)
    )
    if "mtp_block_spec" in submodules.__dataclass_fields__:
        layers["mtp_block_spec"] = _further()
    return ModuleSpec(module=stack, submodules=submodules(**layers))


def transformer_engine_spec() -> ModuleSpec:
    """Return megatron-core's spec of a stack of Transformer Engine's layers."""
    if HYBRID_RECOMPUTES:
        return importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    return importlib.import_module("megatron.core.models.mamba.mamba_layer_specs").mamba_stack_spec


stack_spec = local_spec()
"""For `--spec`, which takes a module and the name of a spec in it."""
