"""Runs the autograd engine's backward from given edges of the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge


def run_backward(
    edges: Sequence[GradientEdge],
    grads: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor | GradientEdge] = (),
    *,
    keeps_graph: bool = False,
    accumulates: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Run the backward from `edges`, and return the gradients of `inputs`, which are tensors or edges of the graph.

    If `accumulates` is set, the gradients are added to `.grad` of the tensors `inputs`, and not returned. Without
    `inputs`, autograd adds gradients to `.grad` of all leaves of the graph. The function calls the autograd engine
    directly, because `torch.autograd.backward` does not accept graph edges in the oldest supported version of torch.
    """
    if not edges:
        return (None,) * len(inputs)
    with owning_gradients(cast("Sequence[torch.Tensor]", inputs) if accumulates else ()):
        return torch.autograd.Variable._execution_engine.run_backward(
            tuple(edges), tuple(grads), keeps_graph, False, tuple(inputs), True, accumulates
        )


@contextmanager
def owning_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give every `.grad` that appears in the `with` block memory that no tensor outside the parameters uses.

    If a parameter is added to an activation through a view, its first `.grad` is a view of the activation's gradient.
    Later backwards change `.grad` in place, while a deferred W or a message to another stage still needs the
    activation's gradient. Gradients of parameters that share memory keep sharing memory, as in a single process.
    """
    fresh = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    yield
    copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for parameter in fresh:
        grad = parameter.grad
        if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
            continue
        storage = grad.untyped_storage()
        # Two uses are the gradient itself and `storage`.
        if storage._cdata not in copies and torch._C._storage_Use_Count(storage._cdata) > 2:
            copies[storage._cdata] = storage, storage.clone()
        if storage._cdata in copies:
            copy = torch.empty(0, dtype=grad.dtype, device=grad.device)
            layout = grad.storage_offset(), grad.size(), grad.stride()
            parameter.grad = copy.set_(copies[storage._cdata][1], *layout)


class NonLeaf(torch.autograd.Function):
    """Makes a tensor that shares the memory of a tensor in another graph, and that is no leaf of its own graph.

    A leaf would stay in its graph, and so on the device, although the graph's saved tensors are copied to the host.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0].detach()  # in a list, the tensor is not in the graph

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None
