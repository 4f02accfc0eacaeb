"""Sends messages through host memory, to find out whether a failing run fails because of NCCL or of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from megatron.zero_bubble.runtime.communicator import PendingReceive, PendingSend, TensorSpec, TorchCommunicator
from megatron.zero_bubble.schedule import Placement

_HOST = torch.device("cpu")


class HostCommunicator:
    """Copies messages to host memory, pinned if they come from a GPU, and sends them over gloo.

    `send` waits until the device has computed the message, and a receive's `wait` copies it back to the device. So
    no work on the device ever waits for another rank, and a valid schedule always runs to its end, with one hardware
    queue or several, and whatever synchronises the device. It is slow and meant for finding faults.

    It has the arguments of `TorchCommunicator`.
    """

    def __init__(
        self,
        pipeline_ranks: Sequence[int],
        rank: int,
        placement: Placement,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self._channels = TorchCommunicator(pipeline_ranks, rank, placement, _HOST, timeout)

    def close(self) -> None:
        """Shut the channels down; no message may be under way."""
        self._channels.close()

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        message = _HostSpec(tuple(tensor.shape), tensor.dtype, tensor.device).empty()
        message.copy_(tensor.detach())
        return self._channels.send(message, destination)

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        host = _HostSpec(spec.shape, spec.dtype, spec.device)
        return _HostReceive(self._channels.receive(source, host), spec.device)


@dataclass(frozen=True)
class _HostSpec(TensorSpec):
    """A message from or to `device` whose buffer is on the host, pinned if the device is a GPU."""

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")


@dataclass(frozen=True)
class _HostReceive:
    receive: PendingReceive
    device: torch.device

    def wait(self) -> torch.Tensor:
        # torch does not reuse the pinned memory before the copy is complete.
        return self.receive.wait().to(self.device, non_blocking=True)
