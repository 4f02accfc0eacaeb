"""Holds the activations that a schedule copies to the host after the forward, and back before the backward."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.zero_bubble.runtime.copy_lane import CopyLane, CopyPair, HostBuffers, PendingCopy
from megatron.zero_bubble.schedule.kinds import OpKind

SMALLEST = 4096
"""Size in bytes of the smallest storage that is copied to the host; smaller storages stay on the device."""
_SAMPLES = 256
"""Largest number of recent copies whose times are kept, for each kind of copy and each model chunk."""


class OffloadStore:
    """Holds the activations that one pipeline rank offloads, by model chunk and microbatch.

    Inside the context `forward`, entries of this store replace the tensors that autograd saves. A storage that several
    saved tensors share is copied once. Parameters, other leaf tensors that require a gradient, tensors that the caller
    keeps anyway, and small tensors stay on the device. `release` frees the storages on the device, and `bring_back`
    allocates new storages. A backward gets every released tensor as a view of a new storage, with the size and the
    strides that the tensor had in the forward.

    Args:
        lane: the host link.
    """

    def __init__(self, lane: CopyLane) -> None:
        self._lane = lane
        self.buffers = HostBuffers(lane)
        self._bundles: dict[tuple[int, int], _Bundle] = {}
        self._copies: dict[tuple[OpKind, int], deque[PendingCopy]] = defaultdict(lambda: deque(maxlen=_SAMPLES))

    @contextmanager
    def forward(self, chunk: int, microbatch: int, kept: Sequence[torch.Tensor | None] = ()) -> Iterator[None]:
        """Collect the tensors that autograd saves while the `with` block runs one F, then queue copies to the host.

        Args:
            kept: tensors that the caller keeps on the device, such as the input of the F.
        """
        bundle = self._bundles[chunk, microbatch] = _Bundle(kept)
        with torch.autograd.graph.saved_tensors_hooks(bundle.pack, _unpack):
            yield
        bundle.close()
        pairs = []
        for storage in bundle.storages:
            assert storage.device is not None
            storage.host = self.buffers.take(storage.num_bytes)
            pairs.append(CopyPair(storage.device, storage.host[: storage.num_bytes]))
        bundle.copy = self._start(OpKind.D, chunk, pairs)

    def wait(self, chunk: int, microbatch: int) -> None:
        """If the activations of a microbatch are offloaded, wait for their last copy (to the host or to the device)."""
        bundle = self._bundles.get((chunk, microbatch))
        if bundle is not None and bundle.copy is not None:
            bundle.copy.wait()

    def release(self, chunk: int, microbatch: int) -> None:
        """Free a microbatch's activations on the device, except storages that are in use outside of this store."""
        for storage in self._bundles[chunk, microbatch].storages:
            if not storage.release():
                self._give_back(storage)

    def bring_back(self, chunk: int, microbatch: int) -> None:
        """Allocate the freed storages of a microbatch on the device again, and queue the copies from the host."""
        bundle, pairs = self._bundles[chunk, microbatch], []
        for storage in bundle.storages:
            if storage.device is None:
                assert storage.host is not None
                storage.device = torch.empty(storage.num_bytes, dtype=torch.uint8, device=storage.place)
                pairs.append(CopyPair(storage.host[: storage.num_bytes], storage.device))
                # Copies run in order: this copy reads the host buffer before a later copy overwrites the buffer.
                self._give_back(storage)
        bundle.copy = self._start(OpKind.H, chunk, pairs)

    def forget(self, chunk: int, microbatch: int) -> None:
        """Drop the activations of a microbatch whose backward has run."""
        self._bundles.pop((chunk, microbatch), None)

    def device_bytes(self, chunk: int, microbatch: int) -> int:
        """Return the number of device bytes in the storages that autograd saved in the F of a microbatch."""
        bundle = self._bundles.get((chunk, microbatch))
        return 0 if bundle is None else bundle.device_bytes()

    def times(self, kind: OpKind, chunk: int) -> list[float]:
        """Return the durations in seconds of recent copies for `chunk`: to the host (`kind` D) or back (`kind` H)."""
        return [copy.seconds() for copy in self._copies[kind, chunk]]

    def left(self) -> list[tuple[int, int]]:
        """Return (chunk, microbatch) of all activations that the store still holds."""
        return list(self._bundles)

    def clear(self) -> None:
        """Drop all activations, for example if the step runs again."""
        for key, bundle in self._bundles.items():
            self.wait(*key)
            for storage in bundle.storages:
                self._give_back(storage)
        self._bundles.clear()

    def _start(self, kind: OpKind, chunk: int, pairs: Sequence[CopyPair]) -> PendingCopy:
        copy = self._lane.start(pairs)
        self._copies[kind, chunk].append(copy)
        return copy

    def _give_back(self, storage: _Storage) -> None:
        if storage.host is not None:
            self.buffers.give_back(storage.host)
            storage.host = None


class _Storage:
    """A storage of tensors saved by autograd: on the device, on the host, or on both while the storage is copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.place = tensor.device
        self.device: torch.Tensor | None = _as_byte_tensor(tensor.untyped_storage(), self.place)
        self.num_bytes = self.device.nbytes
        self.host: torch.Tensor | None = None

    def was_emptied(self) -> bool:
        """Whether the storage on the device has become smaller since autograd saved a tensor that uses the storage."""
        assert self.device is not None
        return self.device.untyped_storage().nbytes() < self.device.nbytes

    def release(self) -> bool:
        """Free the storage on the device; return False if the storage stays because other code still uses it."""
        assert self.device is not None
        reference = StorageWeakRef(self.device.untyped_storage())
        self.device = None
        if reference.expired():
            return True
        self.device = _as_byte_tensor(torch.UntypedStorage._new_with_weak_ptr(reference.cdata), self.place)
        return False


class _Saved(NamedTuple):
    """A tensor saved by autograd, as a view of a `_Storage`."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Bundle:
    """The storages that autograd has saved in the F of one microbatch."""

    def __init__(self, kept: Sequence[torch.Tensor | None]) -> None:
        self.storages: list[_Storage] = []
        """The storages that D frees on the device; the list is empty until F has ended."""
        self.copy: PendingCopy | None = None
        """The most recent copy of the storages."""
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in kept if tensor is not None)
        self._collected: dict[int, weakref.ref[_Storage]] = {}
        self._staying: dict[int, tuple[StorageWeakRef, int]] = {}
        """Identifier of each storage that stays on the device -> (reference to the storage, number of bytes)."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        """Return the object that autograd saves instead of `tensor`."""
        # A transposed weight is a view whose base is the parameter.
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, torch.nn.Parameter):
            return tensor
        is_leaf = base.is_leaf and base.requires_grad  # autograd adds the gradient to this tensor object
        if not is_leaf:
            # Autograd saves a detached tensor: a graph node that saves its own output would keep itself alive.
            tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        stays = is_leaf or storage._cdata in self._kept or tensor.is_conj() or tensor.is_neg()
        if stays or storage.nbytes() < SMALLEST:
            self._staying[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return tensor
        known = self._collected.get(storage._cdata)
        entry = None if known is None else known()
        if entry is None:
            entry = _Storage(tensor)
            self._collected[storage._cdata] = weakref.ref(entry)
        return _Saved(entry, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def close(self) -> None:
        """List the storages that autograd still holds at the end of F; if gradients are disabled, the list is empty.

        A storage that F has emptied stays on the device; with selective recomputation, B fills such a storage again.
        """
        held = [entry for known in self._collected.values() if (entry := known()) is not None]
        self.storages = [entry for entry in held if not entry.was_emptied()]
        self._collected.clear()

    def device_bytes(self) -> int:
        staying = sum(size for reference, size in self._staying.values() if not reference.expired())
        return staying + sum(storage.device.nbytes for storage in self.storages if storage.device is not None)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    storage, dtype, size, stride, offset = saved
    assert storage.device is not None, "a backward ran before its activations were copied back from the host"
    tensor = torch.empty(0, dtype=dtype, device=storage.place)
    return tensor.set_(storage.device.untyped_storage(), offset, size, stride)


def _as_byte_tensor(storage: torch.UntypedStorage, place: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=place).set_(storage)
