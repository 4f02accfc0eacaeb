"""Runs gloo's collectives on copies of GPU tensors in pinned host memory, and copies the results back to the GPU.

Depending on torch's version, only some of gloo's collectives support GPU tensors. Because NCCL may refuse to connect
ranks that share one device, `zero-bubble check` also runs megatron-core over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

_METHODS = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced"),
    *("all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
)
"""Methods of a process group that move tensors between ranks; each version of torch has only some of these methods."""


class StagedWork:
    """Handle of a collective on host copies of tensors; `wait` copies the results to the tensors in `targets`."""

    def __init__(self, work: Any, on_host: list[Any], targets: Any) -> None:
        self._work = work
        self._on_host = on_host  # keeps the copies alive until they have been sent
        self._copies = list(zip(_tensors_inside(targets), _tensors_inside(on_host[0]), strict=False))
        self._result = targets

    def wait(self, *timeout: Any) -> bool:
        if self._work is not None:
            self._work.wait(*timeout)
        with torch.no_grad():
            while self._copies:
                tensor, host = self._copies.pop()
                tensor.copy_(host)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` has copied the collective's results to the original tensors."""
        return not self._copies

    def result(self) -> Any:
        return self._result


def stage_collectives(device_type: str) -> Callable[[], None]:
    """Let all collectives run on host copies of `device_type` tensors; return a function that undoes the change.

    On a machine without a GPU, the device type `cpu` makes it possible to test this module.
    """
    # Taken from the class's dictionary, because the result of `getattr` no longer binds to a group when it is put back.
    originals = {name: vars(dist.ProcessGroup)[name] for name in _METHODS if name in vars(dist.ProcessGroup)}
    for name in originals:
        setattr(dist.ProcessGroup, name, _staged(name, getattr(dist.ProcessGroup, name), device_type))

    def undo() -> None:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)

    return undo


def _staged(name: str, original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def staged(group: Any, first: Any, *others: Any, **options: Any) -> Any:
        arguments = (first, *others)
        if not any(tensor.device.type == device_type for tensor in _tensors_inside(arguments)):
            return original(group, *arguments, **options)
        on_host = tree_map_only(torch.Tensor, _host_copy, list(arguments))
        work = original(group, *on_host, **options)
        return StagedWork(work, on_host, [] if name == "send" else first)

    return staged


def _tensors_inside(argument: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until the device has computed `tensor`, and return a copy of the tensor in host memory."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor.detach())
