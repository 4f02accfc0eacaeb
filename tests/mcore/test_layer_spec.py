"""The specs of a model chunk's layers."""

from __future__ import annotations

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.zero_bubble.mcore.layer_spec import LocalNorm, block_spec, layer_specs
from megatron.zero_bubble.mcore.placement import place_layout
from megatron.zero_bubble.schedule import Placement


def test_a_stage_of_an_uneven_v_has_the_specs_of_its_layers() -> None:
    """The last stage is on rank 0, although megatron-core is told the place of the last rank for it."""
    config = TransformerConfig(
        num_layers=6,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|tt|t|ttL",
        pipeline_dtype=torch.float32,
    )
    place_layout(config, Placement("v", 2, 2), 0)
    layers = [ModuleSpec(module=TransformerLayer) for _ in range(6)]
    assert [block_spec(config, layers, chunk, pp_rank).layer_specs for chunk, pp_rank in ((0, 0), (1, 1))] == [
        layers[:1],
        layers[4:],
    ]


def test_l2_norms_of_queries_and_keys_stay_with_layer_norms_of_this_project() -> None:
    """Sequence parallelism replaces the learned norms of megatron-core's local layers."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "transformer_impl": "local"}
    config = TransformerConfig(**sizes, qk_layernorm=True, qk_l2_norm=True, layernorm_zero_centered_gamma=True)
    [layer] = layer_specs(config, uses_torch_attention=False)
    assert layer.submodules.input_layernorm is LocalNorm
    assert layer.submodules.self_attention.submodules.q_layernorm is not LocalNorm
