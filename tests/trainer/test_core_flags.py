"""Fields of megatron-core's configurations are flags with Megatron-LM's names, and flags make configurations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.zero_bubble.trainer.arguments import Arguments, parse_arguments
from megatron.zero_bubble.trainer.core_flags import _WITHOUT_FLAG, config_values, core_flags
from megatron.zero_bubble.trainer.model import transformer_config
from tests.checked_flags import checked
from tests.trainer.test_arguments import REQUIRED

CONFIGS = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
CALLABLE_OR_OBJECT = {
    *("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
    *("activation_func", "init_method", "output_layer_init_method", "embedding_init_method", "quant_recipe"),
    "pipeline_model_parallel_layout",  # a flag of job/flags.py
}


def parsed(*more: str) -> Arguments:
    return parse_arguments([*REQUIRED, *more])


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_field_is_a_flag_or_said_to_have_none(config_class: type) -> None:
    flags = {one.field for one in core_flags(config_class)}
    without = {entry.name for entry in fields(config_class)} - flags
    assert {name for name in without if not _WITHOUT_FLAG.fullmatch(name)} <= CALLABLE_OR_OBJECT


@pytest.mark.parametrize("config_class", CONFIGS)
def test_without_flags_a_configuration_has_its_defaults(config_class: type) -> None:
    ours = {"transformer_impl": "local", "min_lr": 0.0}
    megatron_lms = {"num_query_groups": 1, "q_lora_rank": None, "kv_lora_rank": 32, "rotary_scaling_factor": 1.0}
    megatron_lms |= {"optimizer_offload_fraction": 1.0, "multi_latent_attention": False, "normalization": "LayerNorm"}
    given = {"num_layers", "hidden_size", "num_attention_heads", "lr", "fp8_recipe"}
    values = config_values(parsed(), config_class)
    defaults = {
        entry.name: (ours | megatron_lms).get(entry.name, entry.default)
        for entry in fields(config_class)
        if entry.name in values and entry.name not in given
    }
    assert {name: values[name] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("flags", "config_class", "expected"),
    [
        ("--disable-bias-linear", TransformerConfig, {"add_bias_linear": False}),
        ("--norm-epsilon 1e-6", TransformerConfig, {"layernorm_epsilon": 1e-6}),
        ("--num-experts 8", TransformerConfig, {"num_moe_experts": 8}),
        ("--moe-layer-freq 2", TransformerConfig, {"moe_layer_freq": 2}),
        ("--moe-layer-freq ([0]*3+[1]*1)", TransformerConfig, {"moe_layer_freq": [0, 0, 0, 1]}),
        ("--moe-layer-freq [0,1]*2", TransformerConfig, {"moe_layer_freq": [0, 1, 0, 1]}),
        ("--window-size 128,0", TransformerConfig, {"window_size": (128, 0)}),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
            TransformerConfig,
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
        ),
        ("--recompute-modules core_attn mlp", TransformerConfig, {"recompute_modules": ["core_attn", "mlp"]}),
        ("--q-lora-rank 24 --rope-type rope", MLATransformerConfig, {"q_lora_rank": 24, "rope_type": "rope"}),
        ("--exp-avg-dtype bf16", OptimizerConfig, {"exp_avg_dtype": torch.bfloat16, "main_grads_dtype": torch.float32}),
        ("--ddp-average-in-collective", DistributedDataParallelConfig, {"average_in_collective": True}),
    ],
)
def test_a_flag_sets_its_field(flags: str, config_class: type, expected: dict[str, Any]) -> None:
    values = config_values(parsed(*flags.split()), config_class)
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--moe-layer-freq [1,2", "--moe-layer-freq: expected a number, or a list such as"),
        ("--moe-layer-freq __import__('os')", "--moe-layer-freq: expected a number"),
        ("--moe-layer-freq [1]*99999999999", "--moe-layer-freq: expected a number"),
        ("--moe-layer-freq [[1],[0]]", "--moe-layer-freq: expected a number"),
        ("--window-size 128", "--window-size: expected two numbers"),
        ("--moe-router-score-function tanh", "--moe-router-score-function: invalid choice: 'tanh'"),
        ("--exp-avg-dtype int8", "--exp-avg-dtype: invalid choice: 'int8'"),
        ("--use-megatron-fsdp", "unrecognized arguments: --use-megatron-fsdp"),
        ("--params-dtype bf16", "unrecognized arguments: --params-dtype bf16"),
    ],
)
def test_a_mistake_is_named(flags: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        parsed(*flags.split())
    assert words in str(error.value)


def test_megatron_core_s_refusal_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^megatron-core refuses this model: no_rope_freq=3 should be[^\n]+$"):
        transformer_config(checked({"--no-rope-freq": "3"}), 1, None)


def test_the_fields_of_another_release_are_flags() -> None:
    @dataclass
    class NewerConfig:
        """A configuration of a release that is not installed."""

        wide_residual: bool = False
        """Widens the residual stream. The second sentence is left out."""
        narrow_head: bool = True
        streams: int | None = None
        order: Literal["first", "last"] = "last"
        renamed: float = field(default=1.0, metadata={"argparse_meta": {"arg_names": ["--other-name"]}})
        callback: Any = None

    found = {one.name: one for one in core_flags(NewerConfig)}
    assert list(found) == ["wide_residual", "no_narrow_head", "streams", "order", "other_name"]
    assert found["wide_residual"].entry[1].metadata["help"] == "Widens the residual stream"
    assert found["no_narrow_head"].entry[1].metadata["names"] == ("--disable-narrow-head",)
    assert found["order"].entry[1].metadata["choices"] == ("first", "last")
