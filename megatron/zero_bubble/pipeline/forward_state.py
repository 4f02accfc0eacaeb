"""Undoes the side effects of forwards: changes of random states, buffers, and weights of embeddings with `max_norm`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def renormalized(module: torch.nn.Module) -> Iterator[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    """Yield a module's embeddings that have `max_norm`, and therefore scale down weight rows in lookups."""
    for inside in module.modules():
        if isinstance(inside, torch.nn.Embedding | torch.nn.EmbeddingBag) and inside.max_norm is not None:
            yield inside


class ForwardState:
    """A copy of the state that forwards change: random states, buffers, and weights of embeddings with `max_norm`."""

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._random_state = torch.get_rng_state()
        self._device = device
        self._device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        inside = {each for module in modules for each in module.modules()}
        self._tensors = [(each._buffers, dict(each._buffers)) for each in inside if each._buffers]
        buffers = [tensor for _, tensors in self._tensors for tensor in tensors.values() if tensor is not None]
        self._values = [(memory, memory.clone()) for memory in map(memory_of, buffers)]
        weights = {table.weight for module in modules for table in renormalized(module)}
        self._values += [(weight, weight.detach().clone()) for weight in weights]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore random states, buffers and weights.

        If a forward has replaced the tensor of a buffer, the module gets the original tensor object back.
        """
        torch.set_rng_state(self._random_state)
        if self._device_state is not None:
            torch.cuda.set_rng_state(self._device_state, self._device)
        for buffers, tensors in self._tensors:
            buffers.clear()
            buffers.update(tensors)
        for tensor, value in self._values:
            if tensor.shape != value.shape:  # a forward has resized the buffer in place
                tensor.resize_(value.shape)
            tensor.copy_(value)


@contextmanager
def without_trace(modules: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """At the end of the `with` block, also after an error, undo the side effects of the forwards in the block."""
    before = ForwardState(modules, device)
    try:
        yield
    finally:
        before.restore()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` that contains each element in memory once, even if `tensor` was expanded."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
