"""Measures how operations change the memory of a rank, on a CPU and on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.runtime.recorder import MemoryMeter
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Op, OpKind
from megatron.zero_bubble.schedule.kinds import COPIES, VOCABULARY

_SAVES = frozenset({OpKind.F, OpKind.R})
"""The operations in which autograd saves tensors for a backward."""


class SavedTensorMeter:
    """Measures memory on a CPU: the bytes that autograd saves in F and R, and the bytes that B keeps for W.

    A storage that several saved tensors share counts once, and parameters do not count. For operations on the rank's
    vocabulary shard, `kept_by_shard` returns the bytes that the shard keeps between the operations of a microbatch. For
    activations that a schedule offloads, `offload` counts the bytes on the device.
    """

    inside = 0  # the peak inside an operation cannot be measured on a CPU

    def __init__(
        self,
        store: WeightGradStore,
        kept_by_shard: Callable[[int], int] | None = None,
        offload: OffloadStore | None = None,
    ) -> None:
        self._store = store
        self._offload = offload
        self._kept_by_shard = kept_by_shard or (lambda microbatch: 0)
        self._kept_before = 0
        self._saved: dict[tuple[int, int], list[weakref.ref[torch.Tensor]]] = {}
        """(chunk, microbatch) -> the tensors that autograd has saved in F and R."""
        self._saved_bytes: dict[tuple[int, int], int] = {}
        self._hooks = ExitStack()

    def begin(self, op: Op) -> None:
        if op.kind in VOCABULARY:
            self._kept_before = self._kept_by_shard(op.microbatch)
        if op.kind not in _SAVES:
            return
        key = (op.chunk, op.microbatch)
        if op.kind is OpKind.F:
            self._saved[key], self._saved_bytes[key] = [], 0
        record = partial(_record_saved, self._saved[key])
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor))

    def end(self, op: Op) -> int:
        if op.kind in VOCABULARY:
            return self._kept_by_shard(op.microbatch) - self._kept_before
        self._hooks.close()
        key = (op.chunk, op.microbatch)
        saved_bytes = 0
        if op.kind in _SAVES | COPIES:
            saved_bytes = _held_bytes(self._saved[key])
            saved_bytes += 0 if self._offload is None else self._offload.device_bytes(*key)
        elif op.kind is OpKind.B:
            saved_bytes = self._store.flushed_bytes
        change = saved_bytes - self._saved_bytes[key]
        self._saved_bytes[key] = saved_bytes
        return change

    def close(self) -> None:
        self._hooks.close()


def _record_saved(saved: list[weakref.ref[torch.Tensor]], tensor: torch.Tensor) -> torch.Tensor:
    """Record a tensor that autograd saves, unless the tensor is a parameter; return the tensor that autograd keeps."""
    # A transposed weight is a view whose base is the parameter.
    if isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
        return tensor
    # Autograd saves a detached tensor: a graph node that saves its own output would otherwise keep itself alive until
    # its backward, and a forward that is undone has no backward.
    kept = tensor.detach().requires_grad_(tensor.requires_grad)
    saved.append(weakref.ref(kept))
    return kept


def _held_bytes(saved: Sequence[weakref.ref[torch.Tensor]]) -> int:
    """Return the bytes of the saved tensors that are still alive.

    The mask of a dropout whose input needs no gradient does not count, because autograd has already freed the mask.
    """
    tensors = [tensor for reference in saved if (tensor := reference()) is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class CudaMeter:
    """Measures memory on a GPU as the bytes that torch's allocator has allocated, message buffers included."""

    def __init__(self) -> None:
        self._before = self.inside = 0

    def begin(self, op: Op) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def end(self, op: Op) -> int:
        after = torch.cuda.memory_allocated()
        self.inside = torch.cuda.max_memory_allocated() - max(self._before, after)
        return after - self._before

    def close(self) -> None:
        pass  # the allocator counts anyway


def memory_meter(
    device: torch.device,
    store: WeightGradStore,
    kept_by_shard: Callable[[int], int] | None = None,
    offload: OffloadStore | None = None,
) -> MemoryMeter:
    """Return a `CudaMeter` if `device` is a GPU, otherwise a `SavedTensorMeter` with the other arguments."""
    return CudaMeter() if device.type == "cuda" else SavedTensorMeter(store, kept_by_shard, offload)
