"""Small layers for the tests of a `Pipeline`, a batch for them, and the comparison of gradients."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 6


def assert_equal(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        assert (value is None) == (ours[name] is None), name
        assert value is None or torch.equal(ours[name], value), name


def stack(count: int) -> tuple[list[nn.Module], tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    layers = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return layers, (torch.randn(8, WIDTH), torch.randn(8, WIDTH))
