"""Flags of Megatron-LM reach the setting of megatron-core that they stand for, or do what Megatron-LM does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.zero_bubble.mcore.layer_spec import LocalNorm
from megatron.zero_bubble.trainer import optimization
from megatron.zero_bubble.trainer.model import transformer_config
from megatron.zero_bubble.trainer.optimization import _ddp_config
from tests.checked_flags import checked


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"--apply-layernorm-1p": None}, {"layernorm_zero_centered_gamma": True}),
        ({"--cross-entropy-loss-fusion": None}, {"cross_entropy_loss_fusion": True}),
        ({"--moe-router-load-balancing-type": "seq_aux_loss"}, {"moe_router_load_balancing_type": "seq_aux_loss"}),
        ({"--no-masked-softmax-fusion": None}, {"masked_softmax_fusion": False}),
        (
            {
                "--fp8-format": "hybrid", "--fp8-amax-history-len": "1024", "--fp8-amax-compute-algo": "max",
                "--transformer-impl": "transformer_engine", "--fp8-param-gather": None,
                "--use-distributed-optimizer": None,
            },
            {"fp8": "hybrid", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "fp8_param": True},
        ),
    ],
)  # fmt: skip
def test_the_model_is_configured(
    changes: dict[str, str | None], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_cuda = "--fp8-format" in changes
    if has_cuda:
        monkeypatch.setattr("megatron.zero_bubble.trainer.checks.check_implementation", lambda transformer_impl: None)
        monkeypatch.setattr("megatron.zero_bubble.trainer.checks.check_devices", lambda *arguments: None)
    args = checked(changes, has_cuda=has_cuda)
    config = transformer_config(args, 1, None)
    assert {name: getattr(config, name) for name in settings} == settings
    assert _ddp_config(args, True).fp8_param_gather == has_cuda


@pytest.mark.parametrize(("changes", "in_fp32"), [({}, True), ({"--grad-reduce-in-bf16": None}, False)])
def test_gradients_are_reduced_in_the_precision_that_is_asked_for(
    changes: dict[str, str | None], in_fp32: bool
) -> None:
    assert _ddp_config(checked({"--bf16": None, **changes}), True).grad_reduce_in_fp32 == in_fp32


def test_embedding_and_output_layer_have_their_own_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    groups = [{"default_config": True}, {"default_config": False}]

    def keep(config: Any, *arguments: Any, **keywords: Any) -> Any:
        given.append(config)
        return type("Optimizer", (), {"scale_loss": None, "param_groups": groups})()

    monkeypatch.setattr(optimization, "get_megatron_optimizer", keep)
    args = checked({"--decoupled-lr": "5e-4", "--decoupled-min-lr": "4.5e-5"})
    optimization.build_optimizer(args, [], transformer_config(args, 1, None))
    assert (given[0].decoupled_lr, given[0].decoupled_min_lr) == (5e-4, 4.5e-5)
    assert [group["is_decoupled_lr"] for group in groups] == [False, True]


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_norm_around_zero_is_the_plain_norm_whose_weight_is_one_more(normalization: str) -> None:
    config = transformer_config(checked({"--apply-layernorm-1p": None, "--normalization": normalization}), 1, None)
    norm = LocalNorm(config, 8, config.layernorm_epsilon)
    assert not any(parameter.any() for parameter in norm.parameters())
    torch.nn.init.normal_(norm.weight)
    plain = getattr(torch.nn, normalization)(8, eps=config.layernorm_epsilon)
    with torch.no_grad():
        plain.weight.copy_(norm.weight + 1)
    hidden = torch.randn(3, 8)
    assert torch.equal(norm(hidden), plain(hidden))
