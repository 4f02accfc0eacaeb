"""Transformer Engine's own deferral of W in our store's order, on a stand-in for its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
from deferring_layer import DeferringLayers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from split_layers import MICROBATCHES, assert_equal, microbatches, one_rank, run_fused, run_split

from megatron.zero_bubble.mcore import transformer_engine
from megatron.zero_bubble.mcore.linear import count_gradients, split_weight_gradients
from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

NAMES = ["first.weight", "second.weight"]


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


def reference(**options: Any) -> DeferringLayers:
    """The same layers, built without deferral."""
    return DeferringLayers(delay_wgrad_compute=False, **options)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_b_then_w_is_the_fused_backward(recompute):
    store, model = WeightGradStore(), DeferringLayers(recompute=recompute)
    assert split_weight_gradients([model], store) == NAMES
    assert count_gradients([model]).in_w == count_gradients([model]).total
    assert_equal(run_split(model, store), run_fused(reference()))
    assert not model.first.queue


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_where_b_and_w_are_fused_w_runs_at_the_end_of_the_backward(recompute):
    store, model = WeightGradStore(), DeferringLayers(recompute=recompute)
    split_weight_gradients([model], store)
    assert_equal(run_fused(model), run_fused(reference()))
    assert store.pending() == []
    assert not model.first.queue


@pytest.mark.parametrize("num_uses", [1, 2])
def test_the_order_is_the_stores_and_hooks_run_once_a_microbatch(num_uses):
    store, model = WeightGradStore(), DeferringLayers(num_uses=num_uses)
    split_weight_gradients([model], store)
    ran = []
    for name in ("first", "second"):
        getattr(model, name).register_wgrad_accumulation_and_reduce_hooks(lambda name=name: ran.append(name))
    for m, (x, gradient) in enumerate(microbatches()):
        with store.deferring():
            model(x).backward(gradient)
        store.flush(0, m)
    assert ran == []
    assert len(model.first.queue) == MICROBATCHES * num_uses
    store.pop(0, 0)
    assert ran == ["second", "first"]
    store.pop_by_parameter(0, [1, 2], lambda microbatch: ran.append(microbatch))
    ones, twos = [1] * num_uses, [2] * num_uses
    assert ran[2:] == [*ones, "second", *twos, "second", *ones, "first", *twos, "first"]


@pytest.mark.parametrize("run", ["split", "fused"])
@pytest.mark.parametrize("bias_gradient", [None, "in W", "in B", "from the caller"])
@pytest.mark.parametrize("num_uses", [1, 2])
def test_ddp_accumulates_at_w(run, bias_gradient, num_uses):
    """DDP adds the sum over a microbatch's uses, as autograd does, whether B or W computes the bias's gradient."""
    store, model = WeightGradStore(), DeferringLayers(bias_gradient=bias_gradient, num_uses=num_uses)
    split_weight_gradients([model], store)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, delay_wgrad_compute=True)
    ddp = DistributedDataParallel(model.config, config, model)
    run_split(ddp, store) if run == "split" else run_fused(ddp)
    expected = run_fused(reference(bias_gradient=bias_gradient, num_uses=num_uses))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.main_grad, expected[name]), name
        assert parameter.grad is None


@pytest.mark.parametrize("overlap_grad_reduce", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("zero_out_wgrad", [False, True], ids=["", "zero_out"])
@pytest.mark.parametrize("run", ["split", "fused"])
def test_with_fused_accumulation_w_finds_a_gradient_and_b_leaves_none(run, zero_out_wgrad, overlap_grad_reduce):
    """megatron-core's hook takes a gradient for each W, while Transformer Engine returns one for each B."""
    store, model = WeightGradStore(), DeferringLayers(fuse_wgrad_accumulation=True)
    for parameter in model.parameters():
        parameter.zero_out_wgrad = zero_out_wgrad
    split_weight_gradients([model], store)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, delay_wgrad_compute=True, overlap_grad_reduce=overlap_grad_reduce
    )
    ddp = DistributedDataParallel(model.config, config, model)
    left_by_b = []
    for group in ddp.bucket_groups:
        group.is_last_microbatch = False
    for m, (x, gradient) in enumerate(microbatches()):
        with store.deferring() if run == "split" else contextlib.nullcontext():
            ddp(x).backward(gradient)
        left_by_b += [parameter.grad for parameter in model.parameters()]
        store.flush(0, m)
    for m in range(MICROBATCHES):
        store.pop(0, m)
    assert left_by_b == [None] * len(left_by_b), "a dummy of a weight's size that lives until W"
    expected = run_fused(reference())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.main_grad, expected[name])
        assert parameter.grad is None


def test_a_model_that_ddp_wraps_again_after_weights_are_frozen_computes_its_gradients():
    """As a loop that adds adapters does: Transformer Engine queues no W for a frozen weight."""
    store, model = WeightGradStore(), DeferringLayers()
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, delay_wgrad_compute=True)
    for is_frozen in (False, True):
        model.first.weight.requires_grad_(not is_frozen)
        split_weight_gradients([model], store)
        ddp = DistributedDataParallel(model.config, config, model)
    run_split(ddp, store)
    assert torch.equal(model.second.weight.main_grad, run_fused(reference())["second.weight"])
    assert not model.first.queue


def test_layers_that_were_built_without_deferral_are_not_split():
    model = reference()
    assert split_weight_gradients([model], WeightGradStore()) == []
    assert [name for name, _ in count_gradients([model]).unsplit] == [
        "first (DeferringLinear)",
        "second (DeferringLinear)",
    ]


def test_the_config_says_so_before_the_modules_are_built():
    model = DeferringLayers()
    assert not model.config.delay_wgrad_compute
    transformer_engine.defer_weight_gradients(model.config)
    assert model.config.delay_wgrad_compute


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "is not installed"), ("2.7.0", r"2\.7\.0 cannot defer weight gradients, 2\.8\.0 and later can")],
)
def test_without_a_transformer_engine_that_defers_there_is_one_line(monkeypatch, found, message):
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(transformer_engine, "version", version)
    with pytest.raises(ValueError, match=f"^Transformer Engine {message}$"):
        transformer_engine.check_transformer_engine()


def test_transformer_engine_from_2_3_on_is_good(monkeypatch):
    monkeypatch.setattr(transformer_engine, "version", lambda name: "2.10.0+cu12")
    transformer_engine.check_transformer_engine()


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_transformer_engine_would_not_call_is_refused(hook):
    model = DeferringLayers()
    split_weight_gradients([model], WeightGradStore())
    getattr(model.first.weight, hook)(lambda gradient: None)
    with pytest.raises(ForwardStepError, match=r"^a parameter of DeferringLinear.* has a hook, .* --transformer-impl"):
        model(microbatches()[0][0])
