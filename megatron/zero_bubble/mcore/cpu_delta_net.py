"""Gated delta nets' kernels in plain PyTorch, for machines without CUDA: those that megatron-core imports from `fla`.

The delta rule itself is megatron-core's own, which it otherwise takes where all must be deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def kernels(delta_rule: Callable[..., Any]) -> dict[str, Any]:
    """Return the replacement for each name that megatron-core imports.

    Args:
        delta_rule: the gated delta rule in plain PyTorch.
    """
    return {
        "HAVE_FLA": True,
        "l2norm": normalized,
        "causal_conv1d": convolved,
        "chunk_gated_delta_rule": delta_rule,
    }


def modules(package: ModuleType) -> list[ModuleType]:
    """Return the modules that import the kernels: `package`, and from megatron-core 0.19 on the modules in it."""
    inner = [value for value in vars(package).values() if isinstance(value, ModuleType)]
    return [package, *(module for module in inner if module.__name__.startswith(package.__name__))]


def normalized(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """Divide by the Euclidean norm over `dim`."""
    return (x.float() * torch.rsqrt(x.float().square().sum(dim, keepdim=True) + eps)).to(x)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, **unused: Any
) -> tuple[torch.Tensor, None]:
    """Convolve each feature with the steps before it.

    Args:
        x: [batch, length, features].
        weight: [features, width].
        activation: name of the function of the result: `silu` or `swish`, which are one.

    Returns:
        [batch, length, features], and no state.
    """
    assert activation in ("silu", "swish")
    padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    result = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))
    return torch.nn.functional.silu(result).transpose(1, 2), None
