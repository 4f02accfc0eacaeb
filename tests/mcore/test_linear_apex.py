"""With apex, W goes straight into `main_grad`: its kernel's contract, on a stand-in for apex' module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import layers as mcore_layers
from split_layers import MICROBATCHES, Layers, microbatches, one_rank, run_fused, run_split

from megatron.zero_bubble.mcore.linear import split_weight_gradients
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were called."""
    called: list[str] = []

    def kernel(name: str):
        def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
            called.append(name)
            assert (total_input.dim(), grad_output.dim()) == (2, 2), "batch and sequence as one"
            main_grad.add_(grad_output.t().matmul(total_input))

        return accumulate

    names = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
    apex = SimpleNamespace(**{name: kernel(name) for name in names})
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", apex)
    monkeypatch.setattr(mcore_layers, "fused_weight_gradient_mlp_cuda", apex, raising=False)
    return called


def in_ddp(dtype: torch.dtype, *, fuses: bool, **settings: bool) -> tuple[DistributedDataParallel, WeightGradStore]:
    """Layers whose backward is split, in DDP with these settings; with apex (`fuses`) or without it."""
    store, model = WeightGradStore(), Layers(dtype)
    for layer in (model.column, model.row):
        layer.gradient_accumulation_fusion = fuses
        layer.weight.zero_out_wgrad = True  # as megatron-core marks a tied embedding
    split_weight_gradients([model], store)
    config = DistributedDataParallelConfig(delay_wgrad_compute=True, **settings)
    return DistributedDataParallel(model.config, config, model), store


def main_grads(dtype: torch.dtype, *, fp32_main_grad: bool, fuses: bool, run: str) -> dict[str, torch.Tensor]:
    """The `main_grad` of every parameter after one step."""
    ddp, store = in_ddp(dtype, fuses=fuses, grad_reduce_in_fp32=fp32_main_grad)
    if run == "split":
        run_split(ddp, store, dtype)
    else:
        run_fused(ddp, dtype)
    assert all(parameter.grad is None for parameter in ddp.parameters())
    return {name: parameter.main_grad for name, parameter in ddp.named_parameters()}


@pytest.mark.parametrize("run", ["split", "fused"])
@pytest.mark.parametrize(
    ("dtype", "fp32_main_grad", "kernel"),
    [
        (torch.float32, True, "wgrad_gemm_accum_fp32"),
        (torch.bfloat16, True, "wgrad_gemm_accum_fp32"),
        (torch.bfloat16, False, "wgrad_gemm_accum_fp16"),
    ],
)
def test_the_kernel_adds_each_microbatch_once(calls, dtype, fp32_main_grad, kernel, run):
    fused = main_grads(dtype, fp32_main_grad=fp32_main_grad, fuses=True, run=run)
    assert calls == [kernel] * (2 * MICROBATCHES), "both layers, every microbatch"
    plain = main_grads(dtype, fp32_main_grad=fp32_main_grad, fuses=False, run=run)
    assert len(calls) == 2 * MICROBATCHES
    for name, gradient in plain.items():
        assert torch.equal(fused[name], gradient), name


@pytest.mark.parametrize("packs", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("run", ["split", "fused"])
def test_ddp_learns_of_every_gradient(calls, monkeypatch, run, packs):
    """Offloading packs the tensors that autograd saves: the backward finds a weight without the parameter's marks."""
    ddp, store = in_ddp(torch.float32, fuses=True, overlap_grad_reduce=True)
    ready, x, gradient = [], *microbatches()[0]
    for group in ddp.bucket_groups:
        monkeypatch.setattr(group, "register_grad_ready", lambda parameter, *_: ready.append(parameter))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with hooks if packs else nullcontext():
        output = ddp(x)
    with store.deferring() if run == "split" else nullcontext():
        output.backward(gradient)
    store.flush(0, 0)
    store.pop(0, 0)
    assert len(calls) == 2
    assert len(ready) == len(set(ready)) == len(list(ddp.parameters()))
    assert all(parameter.grad is None for parameter in ddp.parameters())
