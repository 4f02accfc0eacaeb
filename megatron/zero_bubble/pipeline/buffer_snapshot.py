"""Undoes the changes that forwards make to the buffers of modules, such as running means."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class BufferSnapshot:
    """The buffers of `modules`: the tensors themselves, and copies of their values."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        inside = {each for module in modules for each in module.modules()}
        self._tensors = [(each._buffers, dict(each._buffers)) for each in inside if each._buffers]
        buffers = [tensor for _, tensors in self._tensors for tensor in tensors.values() if tensor is not None]
        self._values = [(memory, memory.clone()) for memory in map(memory_of, buffers)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the buffer tensors that forwards have replaced, and restore the values of all buffers."""
        for buffers, tensors in self._tensors:
            buffers.clear()
            buffers.update(tensors)
        for tensor, value in self._values:
            tensor.copy_(value)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of an expanded tensor that has each element in memory once; any other tensor as it is."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
