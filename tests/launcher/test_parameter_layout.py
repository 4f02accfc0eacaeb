"""A script lays out the parameters that a chunk has after its vocabulary is spread over the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest
import torch

from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.parameter_layout import shard_before_layout


def compute_full_param_layout(params: Sequence[torch.nn.Parameter], bucket_size: int) -> tuple[list[int], int]:
    """Stand in for megatron-core's function: return the sizes of the parameters."""
    return [parameter.numel() for parameter in params], bucket_size


def call_for(parameters: Sequence[torch.nn.Parameter]) -> Call:
    return Call(compute_full_param_layout, inspect.signature(compute_full_param_layout).bind(parameters, 7))


@pytest.mark.parametrize("trained", [[], [torch.nn.Linear(3, 3)]], ids=["frozen", "trained"])
def test_the_parameters_after_sharding_are_laid_out(trained: list[torch.nn.Module]) -> None:
    chunk = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), *trained)
    chunks = [torch.nn.Linear(5, 5), chunk]
    before = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    call = call_for(before)
    shard_before_layout(call, chunks, lambda: chunk.register_parameter("shard", torch.nn.Parameter(torch.ones(6))))
    assert call.proceed() == ([6, *(parameter.numel() for parameter in before)], 7)


def test_another_models_parameters_are_laid_out_as_they_are() -> None:
    other, call = torch.nn.Linear(2, 2), call_for(list(torch.nn.Linear(2, 3).parameters()))
    shard_before_layout(call, [other], lambda: pytest.fail("sharded"))
    assert call.proceed() == ([6, 3], 7)
