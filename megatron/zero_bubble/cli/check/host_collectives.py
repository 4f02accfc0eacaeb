"""Lets collectives over gloo take a GPU's tensors: they are copied to pinned host memory, and what arrives back.

gloo takes some of them as they are and not others, by torch's version. Where several ranks share one device, which NCCL
may refuse, megatron-core's own schedule and its parallelism run over this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_METHODS = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced"),
    *("all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
)
"""Of a process group, in any version of torch, those that move tensors. What they write is their first argument."""


class StagedWork:
    """A collective on copies on the host; `wait` copies what has arrived to where it is wanted."""

    def __init__(self, work: Any, on_host: list[Any], wanted: Any) -> None:
        self._work = work
        self._on_host = on_host  # it must stay until it has been sent
        self._copies = list(zip(_tensors(wanted), _tensors(on_host[0]), strict=False))
        self._result = wanted

    def wait(self, *timeout: Any) -> bool:
        if self._work is not None:
            self._work.wait(*timeout)
        with torch.no_grad():
            while self._copies:
                tensor, host = self._copies.pop()
                tensor.copy_(host)
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for: only then is everything where it is wanted."""
        return not self._copies

    def result(self) -> Any:
        return self._result


def stage_collectives(device_type: str) -> Callable[[], None]:
    """Stage every collective on tensors of this type of device from now on; the function returned undoes it.

    With `cpu` all tensors are copied: this tries the staging where there is no GPU.
    """
    # As the class has them: what `getattr` gives is not bound to a group any more once it is put back.
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
        if not any(tensor.device.type == device_type for argument in arguments for tensor in _tensors(argument)):
            return original(group, *arguments, **options)
        on_host = [_on_host(argument) for argument in arguments]
        work = original(group, *on_host, **options)
        return StagedWork(work, on_host, [] if name == "send" else first)

    return staged


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [tensor for part in argument for tensor in _tensors(part)]
    return []


def _on_host(argument: Any) -> Any:
    """The argument with a copy on the host in place of each tensor; the device has computed it then."""
    if isinstance(argument, torch.Tensor):
        host = torch.empty(argument.shape, dtype=argument.dtype, pin_memory=argument.is_cuda)
        return host.copy_(argument.detach())
    if isinstance(argument, (list, tuple)):
        return [_on_host(part) for part in argument]
    return argument
