"""Layers of a hybrid model for `--spec`, of megatron-core's own modules: the stock ones need Transformer Engine."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

# The norm after the last layer is not in the specification.
hybrid_block.TENorm = WrappedTorchNorm

_dense = get_gpt_layer_local_spec().submodules
_experts = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False).submodules

hybrid_stack_spec = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_dense.input_layernorm,
                self_attention=_dense.self_attention,
                self_attn_bda=_dense.self_attn_bda,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_dense.pre_mlp_layernorm, mlp=_dense.mlp, mlp_bda=_dense.mlp_bda
            ),
        ),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_experts.pre_mlp_layernorm, mlp=_experts.mlp, mlp_bda=_experts.mlp_bda
            ),
        ),
    ),
)
