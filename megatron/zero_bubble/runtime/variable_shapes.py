"""Sends messages whose shapes the receiver does not know in advance.

The sender announces a message of unknown shape with a header, which contains the shape. Headers have separate channels
between the CPUs, and are sent in the order of the messages. The receiver posts the receive of a message after the
message's header has arrived.

Two kinds of messages need no header: messages of fixed shape, and *answers*, whose shapes the receiver knows from
messages that it has sent. For example, the gradient of an activation is an answer, because the rank that receives the
gradient has sent the activation and therefore knows the shape.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from megatron.zero_bubble.runtime.communicator import (
    Communicator,
    PendingReceive,
    PendingSend,
    TensorSpec,
    TorchCommunicator,
)

HEADER = TensorSpec((1 + 64,), torch.int64, torch.device("cpu"))
"""A message header: number of dimensions (at most 64 in torch's operations), their sizes, and zeros as padding."""


@dataclass(frozen=True)
class AnnouncedSpec:
    """The type and the device of a message whose header contains the shape of the message."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class AnswerSpec:
    """Describes an answer to a message that this rank sends; the answer's shape is known once the message is sent."""

    find: Callable[[], TensorSpec | None]
    """Returns the shape and type of the answer to this rank's message; None as long as the shape is unknown."""


def refuse_one_queue(
    device: torch.device, messages: str = "shapes that vary", environment: Mapping[str, str] = os.environ
) -> None:
    """Raise `ValueError` on a GPU with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

    If shapes vary, a receiver that waits for a header posts the receive of the message late, so that the sender waits.
    With one hardware queue, a waiting send also delays all later work of the sending rank. If a message has several
    tensors, the second receive of a message waits in the queue for the first receive, and delays all later work.

    Args:
        messages: describes the messages that need several queues; the first words of the error message.
        environment: the environment variables of the process that uses the GPU.
    """
    if device.type == "cuda" and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ValueError(f"{messages} need several hardware queues: unset CUDA_DEVICE_MAX_CONNECTIONS, which is 1")


AnySpec = TensorSpec | AnnouncedSpec | AnswerSpec


@runtime_checkable
class Announcing(Protocol):
    """A communicator whose `announce` is called for every activation before the activation is sent."""

    def announce(self, tensor: torch.Tensor, destination: int) -> PendingSend: ...


class VariableCommunicator:
    """A `Communicator` that also receives messages of unknown shape.

    A rank waits for the header of a message only at the operation that uses the message. The rank posts the receive of
    a message of unknown shape after all earlier receives of the channel, so that receives keep the schedule's order.

    Args:
        messages: the channels of the messages.
        headers: the channels of the headers, between the CPUs of the ranks. A header is sent when the process launches
            the send of the message, even if a GPU has not computed the message yet.
    """

    def __init__(self, messages: Communicator, headers: Communicator) -> None:
        self._messages, self._headers = messages, headers
        self._channels: dict[int, deque[_Receive]] = defaultdict(deque)

    def announce(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        """Send a header with the shape of `tensor` to rank `destination`, before the call of `send` with `tensor`."""
        header = torch.zeros(HEADER.shape, dtype=HEADER.dtype, device=HEADER.device)
        header[: 1 + tensor.dim()] = torch.tensor([tensor.dim(), *tensor.shape], device=HEADER.device)
        return self._headers.send(header, destination)

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        return self._messages.send(tensor, destination)

    def receive(self, source: int, spec: AnySpec) -> PendingReceive:
        """Request the next message from rank `source`; return at once.

        The requested receives that precede the first message of unknown shape are posted.
        """
        header = self._headers.receive(source, HEADER) if isinstance(spec, AnnouncedSpec) else None
        receive = _Receive(self, source, spec, header)
        self._channels[source].append(receive)
        self._post_known(source)
        return receive

    def post(self, receive: _Receive) -> PendingReceive:
        """Post a channel's receives in order, up to `receive`; wait for the header of each message of unknown shape."""
        channel = self._channels[receive.source]
        while receive.posted is None:
            first = channel.popleft()
            first.posted = self._messages.receive(receive.source, first.shape())
        self._post_known(receive.source)
        return receive.posted

    def close(self) -> None:
        """Close the channels of messages and headers, each a `TorchCommunicator`, when no message is in flight."""
        for communicator in (self._messages, self._headers):
            assert isinstance(communicator, TorchCommunicator)
            communicator.close()

    def _post_known(self, source: int) -> None:
        """Post in order the receives of a channel that precede the first message of unknown shape."""
        channel = self._channels[source]
        while channel and (spec := channel[0].known()) is not None:
            channel.popleft().posted = self._messages.receive(source, spec)


@dataclass
class _Receive:
    """A message that was requested and whose receive may not be posted yet."""

    communicator: VariableCommunicator
    source: int
    spec: AnySpec
    header: PendingReceive | None
    posted: PendingReceive | None = None

    def known(self) -> TensorSpec | None:
        """Return the message's shape and type if this rank knows both without waiting, else None."""
        if isinstance(self.spec, AnswerSpec):
            return self.spec.find()
        return self.spec if isinstance(self.spec, TensorSpec) else None

    def shape(self) -> TensorSpec:
        """Wait for the header of a message of unknown shape; return the message's shape and type."""
        if isinstance(self.spec, AnnouncedSpec):
            assert self.header is not None
            dimensions, *sizes = self.header.wait().tolist()
            return TensorSpec(tuple(sizes[:dimensions]), self.spec.dtype, self.spec.device)
        known = self.known()
        assert known is not None, f"a message from rank {self.source} answers a message that this rank has not sent"
        return known

    def wait(self) -> torch.Tensor:
        return self.communicator.post(self).wait()
