"""Runs the autograd engine's backward from given edges of the autograd graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge


def run_backward(
    edges: Sequence[GradientEdge],
    grads: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor] = (),
    *,
    keeps_graph: bool = False,
    accumulates: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Run the backward from `edges`, and return the gradients of `inputs`.

    If `accumulates` is set, the gradients are added to `.grad` and not returned. Without `inputs`, autograd adds
    gradients to `.grad` of all leaves of the graph. The function calls the autograd engine directly, because
    `torch.autograd.backward` does not accept graph edges in the oldest supported version of torch.
    """
    if not edges:
        return (None,) * len(inputs)
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges), tuple(grads), keeps_graph, False, tuple(inputs), True, accumulates
    )
