"""The communicator of emulated runs, which delays real messages and measures exposed communication."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from benchmarks.emulation.sleeping import await_arrival
from megatron.zero_bubble.runtime.communicator import Communicator, PendingReceive, PendingSend, TensorSpec


@dataclass
class EmulatedLink:
    """A communicator that delivers messages at the times in their headers, and measures exposed communication.

    If a receiver waits before the message is sent, the wait counts as bubble; the wait after the sending counts as
    exposed communication.

    Attributes:
        exposed: total seconds of waiting for messages that were already sent, since `exposed` was last set to 0.
    """

    inner: Communicator
    exposed: float = field(default=0.0, init=False)

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        return self.inner.send(tensor, destination)

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        return _Receive(self, self.inner.receive(source, spec))


@dataclass(frozen=True)
class _Receive:
    link: EmulatedLink
    inner: PendingReceive

    def wait(self) -> torch.Tensor:
        start = time.perf_counter()
        message = self.inner.wait()
        sent = await_arrival(message)
        self.link.exposed += max(0.0, time.perf_counter() - max(start, sent))
        return message
