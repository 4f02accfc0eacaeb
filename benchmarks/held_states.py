"""Finds the parameters, gradients and optimizer states (copies and moments) of a model on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import to_local_if_dtensor

from megatron.zero_bubble.mcore.fully_sharded import FullyShardedChunk
from megatron.zero_bubble.mcore.optimizer import torch_optimizers


def held_state_bytes(chunks: Sequence[Any], optimizer: MegatronOptimizer) -> int:
    """Return the bytes of all states that are in this rank's memory at present; each storage counts once."""
    return num_bytes(_state_tensors(chunks, optimizer))


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of the storages of `tensors`; a storage that several tensors share counts once."""
    storages = [to_local_if_dtensor(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _state_tensors(chunks: Sequence[Any], optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for parameter in chunk.parameters():
            yield from _with_gradients(parameter)
        if isinstance(chunk, FullyShardedChunk):
            yield from chunk.gathered_tensors()
        else:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield from (tensor for tensor in (buffer.param_data, buffer.grad_data) if tensor is not None)
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield from _with_gradients(parameter)
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0)


def _with_gradients(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    gradients = (parameter.grad, getattr(parameter, "main_grad", None))
    yield from (parameter, *(gradient for gradient in gradients if gradient is not None))
