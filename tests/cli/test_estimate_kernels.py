"""Estimates of trainings whose flags choose GPU kernels: fp8, fp4, dispatchers and routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import estimate, estimate_layout
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.schedule import Placement

MODEL = ["--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "512"]
MODEL += ["--vocab-size", "300", "--bf16", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]
MODEL += ["--global-batch-size", "8", "--disable-bias-linear", "--use-distributed-optimizer"]
EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size", "2"]
FULLY = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]


def job(*more: str) -> EstimatedJob:
    return EstimatedJob.of(read_flags(EstimateFlags, ["--world-size", "4", "--", *MODEL, *more], "test", ""))


@pytest.mark.parametrize(
    "flags",
    [
        ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-param-gather"),
        ("--fp4-format", "e2m1", "--fp4-param-gather"),
        ("--memory-efficient-layer-norm",),
        (*EXPERTS, "--fp8-format", "e4m3", "--moe-router-padding-for-fp8"),
        (*EXPERTS, "--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"),
        (*EXPERTS, "--moe-router-load-balancing-type", "sinkhorn"),
    ],
)
def test_kernels_do_not_change_parameters_and_operations(flags: tuple[str, ...]) -> None:
    plain, chosen = job(*(EXPERTS if "--num-experts" in flags else ())), job(*flags)
    for ours, theirs in zip(chosen.count.units, plain.count.units, strict=True):
        assert ours.parameters == theirs.parameters
        assert ours.flops == pytest.approx(theirs.flops, rel=0.01)


def test_a_model_that_megatron_core_refuses_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TopKRouter, *args: Any) -> None:
        raise AssertionError("Sinkhorn routing does not support aux loss.")

    monkeypatch.setattr(TopKRouter, "forward", refuse)
    with pytest.raises(ValueError, match=r"^megatron-core refuses this model: Sinkhorn routing does not support"):
        job(*EXPERTS)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_with_fp8_the_backward_recomputes(method: str) -> None:
    """Transformer Engine's backward does, so that no R can be planned; without fp8, R takes the same time."""
    flags = [*FULLY, "--recompute-method", method]
    inside, apart = (job(*flags, *more).stage_costs(Placement("linear", 2)) for more in (("--fp8-format", "e4m3"), ()))
    assert not any((*inside.time_r, *inside.memory_r))
    assert any(apart.time_r)
    for stage in range(2):
        assert inside.time_b[stage] == pytest.approx(apart.time_b[stage] + apart.time_r[stage])
        assert inside.memory_f[stage] == pytest.approx(apart.memory_f[stage] - apart.memory_r[stage])
    whole = estimate(job("--fp8-format", "e4m3"), "1f1b")
    assert max(estimate(job(*flags, "--fp8-format", "e4m3"), "1f1b").activation_bytes) < max(whole.activation_bytes)


def test_a_search_for_layouts_also_recomputes_in_the_backward() -> None:
    model = job(*FULLY, "--fp8-format", "e4m3", "--zero-bubble").costs
    apart = job(*FULLY, "--zero-bubble").costs
    assert [layer.time_r for layer in model.layers] == [0] * 8
    assert model.layers[0].time_b == pytest.approx(apart.layers[0].time_b + apart.layers[0].time_r)
    assert model.layers[0].memory_f == pytest.approx(apart.layers[0].memory_f - apart.layers[0].memory_r)


def test_the_flags_of_a_layout_keep_it_within_the_devices_memory() -> None:
    """By default, a given layout is limited by the peak of 1F1B in this layout, and the search by Megatron's split."""
    assert estimate_layout(job("--zero-bubble")).layout_flags["zero_bubble_memory_limit"] == "auto"
    limited = estimate_layout(job("--zero-bubble", "--zero-bubble-memory-limit", "1.5"))
    assert "zero_bubble_memory_limit" not in limited.layout_flags


def test_a_vocabulary_that_does_not_divide_into_shards_is_refused() -> None:
    flags = ("--vocab-size", "301", "--make-vocab-size-divisible-by", "1", "--tensor-model-parallel-size", "2")
    with pytest.raises(ValueError, match=r"a padded vocabulary of 302 does not divide into shards for 2 pipeline"):
        job(*flags, "--zero-bubble-schedule", "zb-h1", "--zero-bubble-vocabulary-parallel", "on")
