"""Sends tensors between neighboring pipeline ranks.

Each ordered pair of ranks that exchange messages is a *channel*. A message on one channel never waits for a message on
another channel. The messages of one channel arrive in the order in which the sender sends them. The schedule
determines the order in which a rank sends and receives messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.process_group import Membership
from megatron.zero_bubble.runtime.process_group import connect as connect_group
from megatron.zero_bubble.schedule import Placement


@dataclass(frozen=True)
class TensorSpec:
    """Shape, type and device of a message, which the receiver must know before the message arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class PendingSend(Protocol):
    """A message that is being sent. A `PendingSend` keeps the sent tensor alive until the send is complete."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class PendingReceive(Protocol):
    """A posted receive, whose message may not have arrived yet."""

    def wait(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Arrived:
    """A message that is available at once, such as a message between two stages of the same rank."""

    message: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.message


class Communicator(Protocol):
    """Sends and receives messages for one pipeline rank.

    The arguments `destination` and `source` of the methods are pipeline ranks.
    """

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        """Start to send `tensor` to rank `destination`; return at once."""

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        """Post the receive of the next message from rank `source`; return at once."""


def channels(placement: Placement) -> list[tuple[int, int]]:
    """Return the (source, destination) pairs of ranks that exchange messages under `placement`.

    All ranks open the channels in the order of the returned pairs. The channels whose lower rank is even come before
    the channels whose lower rank is odd, so that channels without a common rank can open at the same time.
    """
    pairs = set()
    for stage in range(placement.num_stages - 1):
        here, there = placement.rank_of(stage), placement.rank_of(stage + 1)
        if here != there:
            pairs |= {(here, there), (there, here)}
    return sorted(pairs, key=lambda ends: (min(ends) % 2, ends))


_RUN_AHEAD = 8
"""Largest number of posted messages that the GPU has not reached; with 8, the GPU has work while the process waits."""


class RunAhead:
    """Keeps the process that launches work on a GPU at most `_RUN_AHEAD` messages ahead of the GPU.

    A posted message takes memory at once, although the GPU uses this memory only after all work launched earlier.
    Without a limit, the process would post all messages of a step while the GPU runs a few operations.
    """

    def __init__(self) -> None:
        self._marks: deque[torch.cuda.Event] = deque()

    def before_message(self) -> None:
        """Before the process posts message n, wait until the GPU has reached message n - `_RUN_AHEAD`."""
        if len(self._marks) == _RUN_AHEAD:
            self._marks.popleft().synchronize()
        self._marks.append(torch.cuda.Event(blocking=True))
        self._marks[-1].record()


class TorchCommunicator:
    """Sends messages over torch.distributed, with a process group for each channel.

    With NCCL all operations of one group run in order on one stream, so channels that shared a group would wait for
    each other. Start-up does not take longer with more ranks, because only the two ranks of a channel create the
    channel, and most channels are created at the same time.

    Args:
        pipeline_ranks: global rank of each pipeline rank.
        rank: this process's pipeline rank.
        placement: assigns stages to ranks, and so determines which ranks exchange messages.
        device: device of the messages.
        timeout: time after which a send or receive fails if the other rank does not take part.
        connect: function that creates a channel's process group, called on both ranks of the channel; by default the
            process group is a `ProcessGroupNCCL` or `ProcessGroupGloo`.
    """

    def __init__(
        self,
        pipeline_ranks: Sequence[int],
        rank: int,
        placement: Placement,
        device: torch.device,
        timeout: timedelta,
        connect: Callable[[Membership], Any] | None = None,
    ) -> None:
        self._rank = rank
        self._run_ahead = RunAhead() if device.type == "cuda" else None
        self._groups: dict[tuple[int, int], Any] = {}
        connect = connect or connect_group
        for ends in channels(placement):
            if rank in ends:
                source, destination = members = pipeline_ranks[ends[0]], pipeline_ranks[ends[1]]
                name = f"megatron.zero_bubble/{source}->{destination}"
                self._groups[ends] = connect(Membership(name, members, ends.index(rank), device, timeout))
        self._open(device)

    def _open(self, device: torch.device) -> None:
        """Send one number through every channel, because NCCL connects two ranks only at their first message.

        While NCCL connects two ranks, NCCL blocks both ranks. All ranks go through their channels in the same order, so
        that a circular wait cannot occur.
        """
        for source, destination in self._groups:
            probe = torch.full((1,), float(source), device=device)
            if source == self._rank:
                self.send(probe, destination).wait()
            else:
                arrived = self.receive(source, TensorSpec((1,), probe.dtype, device)).wait()
                assert arrived.item() == source, f"channel {source}->{destination} is crossed with another"

    def close(self) -> None:
        """Close the channels; the caller must ensure that no message is in flight.

        NCCL warns at exit about channels that are still open.
        """
        for group in self._groups.values():
            group.shutdown()
        self._groups = {}

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        if self._run_ahead is not None:
            self._run_ahead.before_message()
        # The result of `Tensor.conj` is lazy: its memory holds values that are not conjugated yet.
        is_sent_as_it_is = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        message = tensor if is_sent_as_it_is else tensor.detach().resolve_conj().resolve_neg().contiguous()
        # In the process group of a channel, the sender has rank 0 and the receiver has rank 1.
        work = self._groups[self._rank, destination].send([_as_real(message)], 1, 0)
        # A detached tensor keeps the message alive although the caller may free the values of `tensor`. The tensor is
        # detached only after the send is posted, because the receiver waits for the send.
        return _TorchSend(work, message.detach())

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        if self._run_ahead is not None:
            self._run_ahead.before_message()
        buffer = spec.empty()
        return _TorchReceive(self._groups[source, self._rank].recv([_as_real(buffer)], 0, 0), buffer)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with real and imaginary parts as numbers, because NCCL has no complex types."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class _TorchSend:
    """Keeps a sent message alive until NCCL has read the message or, with gloo, until `wait` has completed the send."""

    work: dist.Work
    message: torch.Tensor

    def is_done(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()


@dataclass(frozen=True)
class _TorchReceive:
    work: dist.Work
    buffer: torch.Tensor

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.buffer


class HostCommunicator(TorchCommunicator):
    """Copies each message to host memory (pinned memory for a GPU), and sends the copy over gloo.

    `send` waits until the device has computed the message, and `PendingReceive.wait` copies the message to the device.
    Because no work on the device waits for another rank, a valid schedule always runs to its end, even on a GPU with
    one hardware queue, and even if other code synchronizes the device. A `HostCommunicator` is slow, and is meant for
    debugging.

    The arguments of `HostCommunicator` are the first five arguments of `TorchCommunicator`.
    """

    def __init__(
        self,
        pipeline_ranks: Sequence[int],
        rank: int,
        placement: Placement,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        super().__init__(pipeline_ranks, rank, placement, torch.device("cpu"), timeout)

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        message = _HostSpec(tuple(tensor.shape), tensor.dtype, tensor.device).empty()
        message.copy_(tensor.detach())
        return super().send(message, destination)

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        host = _HostSpec(spec.shape, spec.dtype, spec.device)
        return _HostReceive(super().receive(source, host), spec.device)


@dataclass(frozen=True)
class _HostSpec(TensorSpec):
    """A `TensorSpec` of a message whose buffer is in host memory; the memory is pinned if `device` is a GPU."""

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")


@dataclass(frozen=True)
class _HostReceive:
    receive: PendingReceive
    device: torch.device

    def wait(self) -> torch.Tensor:
        # torch does not reuse the pinned memory before the copy is complete.
        return self.receive.wait().to(self.device, non_blocking=True)
