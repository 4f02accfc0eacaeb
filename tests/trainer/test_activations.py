"""The activations of Megatron-LM's flags: their functions, and where a kernel also adds the bias."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.trainer.arguments import parse_arguments
from megatron.zero_bubble.trainer.model import transformer_config
from tests.checked_flags import refusal
from tests.trainer.test_arguments import REQUIRED


def config(flags: str) -> TransformerConfig:
    """The configuration of a model with these flags, which are not checked: Transformer Engine is not installed."""
    return transformer_config(parse_arguments([*REQUIRED, *flags.split()]), 1, None)


@pytest.mark.parametrize(
    ("flag", "function", "is_gated"),
    [
        ("", torch.nn.functional.gelu, False),
        ("--swiglu", torch.nn.functional.silu, True),
        ("--quick-geglu", lambda x: x * torch.sigmoid(1.702 * x), True),
        ("--squared-relu", lambda x: x.clamp(min=0).square(), False),
    ],
)
def test_a_flag_sets_the_function_and_the_gate(flag, function, is_gated):
    made = config(flag)
    x = torch.linspace(-3, 3, 13)
    torch.testing.assert_close(made.activation_func(x), function(x))
    assert made.gated_linear_unit is is_gated


@pytest.mark.parametrize("pair", ["--swiglu --squared-relu", "--quick-geglu --squared-relu", "--swiglu --quick-geglu"])
def test_an_mlp_has_one_activation(pair):
    assert refusal(dict.fromkeys(pair.split())) == (
        f"{' and '.join(pair.split())}: an MLP has one activation, give one of them"
    )


@pytest.mark.parametrize(
    ("flags", "is_fused"),
    [
        ("", True),
        ("--disable-bias-linear", False),
        ("--no-bias-gelu-fusion", False),
        ("--swiglu --disable-bias-linear", True),
        ("--swiglu --no-bias-swiglu-fusion", False),
        ("--squared-relu", False),
        ("--quick-geglu", False),
        ("--num-experts 4", False),
        ("--quick-geglu --num-experts 4", True),
        ("--quick-geglu --num-experts 4 --disable-bias-linear", False),
        ("--quick-geglu --num-experts 4 --moe-layer-freq 2", False),
        ("--quick-geglu --num-experts 4 --moe-shared-expert-intermediate-size 32", False),
    ],
)
def test_transformer_engines_layers_fuse_what_megatron_core_has_a_kernel_for(flags, is_fused):
    assert config(f"--transformer-impl transformer_engine {flags}").bias_activation_fusion is is_fused
    assert not config(flags).bias_activation_fusion
