"""Runs autograd's backward from edges of the graph."""

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
    """Run autograd from `edges`; return the gradients of `inputs`, or add them to `.grad` if `accumulates` is set.

    Without `inputs`, autograd adds gradients to `.grad` of all leaves. The engine is called directly, because
    `torch.autograd.backward` does not take graph edges in the oldest supported version of torch.
    """
    if not edges:
        return (None,) * len(inputs)
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges), tuple(grads), keeps_graph, False, tuple(inputs), True, accumulates
    )
