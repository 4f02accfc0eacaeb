"""Runs modules with B apart from W, and compares their gradients."""

from __future__ import annotations

import torch
from torch import nn

from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore

MICROBATCHES = 3


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(ours: nn.Module, reference: nn.Module) -> None:
    for name, grad in gradients(reference).items():
        mine = gradients(ours)[name]
        assert (mine is None) == (grad is None), name
        assert grad is None or torch.equal(mine, grad), name


def run(module: nn.Module, inputs: list[torch.Tensor], store: WeightGradStore | None = None) -> list[torch.Tensor]:
    """Run forward and backward of all inputs, with B apart from W if there is a store; return the inputs' gradients."""
    found = []
    for k, x in enumerate(inputs):
        x = x.clone().requires_grad_(x.is_floating_point())
        output = module(x)
        loss = output.float().square().sum()
        if store is None:
            loss.backward()
        else:
            with store.deferring():
                loss.backward()
            store.flush(0, k)
        found.append(x.grad)
    return found
