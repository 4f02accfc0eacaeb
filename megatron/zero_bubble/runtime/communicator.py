"""The point-to-point seam: tensors between neighbouring pipeline ranks.

Each ordered pair of ranks that exchange messages is a *channel*: a message on one channel never waits
for one on another, and messages of one channel arrive in the order in which they were sent. What
that order is, both ends read from the lowered schedule.

`TorchCommunicator` runs on torch.distributed, `InMemoryNetwork` between threads of one process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin one only from Python 3.11 on
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.schedule import Placement


@dataclass(frozen=True)
class TensorSpec:
    """What a receiver must know about a message before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class PendingSend(Protocol):
    """A message under way; it keeps the tensor alive until it has been sent."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class PendingReceive(Protocol):
    """A message that will arrive."""

    def wait(self) -> torch.Tensor: ...


class Communicator(Protocol):
    """Sends and receives of one pipeline rank. Peers are pipeline ranks, not global ranks."""

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        """Start to send; return at once."""
        ...

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        """Post the receive of the next message of the channel from `source`; return at once."""
        ...


def channels(placement: Placement) -> list[tuple[int, int]]:
    """The ordered pairs of ranks that exchange messages under `placement`, in one global order.

    Channels are opened in this order: first those between ranks 0 and 1, 2 and 3, ..., which have no rank
    in common and are opened at the same time, then those between 1 and 2, 3 and 4, ...
    """
    pairs = set()
    for stage in range(placement.num_stages - 1):
        here, there = placement.rank_of(stage), placement.rank_of(stage + 1)
        if here != there:
            pairs |= {(here, there), (there, here)}
    return sorted(pairs, key=lambda ends: (min(ends) % 2, ends))


class TorchCommunicator:
    """Channels over torch.distributed, each with a process group of its own.

    With NCCL all operations of one group run in order on one stream, so channels that shared a group
    would wait for each other. Only the two members of a channel take part in creating it, and most channels
    are created at the same time: start-up does not grow with the number of ranks.

    Args:
        pipeline_ranks: global rank of each pipeline rank.
        rank: this process's pipeline rank.
        placement: tells which ranks are neighbours.
        device: where messages live.
        timeout: after which a send or receive that nobody meets fails.
    """

    def __init__(
        self,
        pipeline_ranks: Sequence[int],
        rank: int,
        placement: Placement,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self._rank = rank
        self._groups: dict[tuple[int, int], Any] = {}
        for source, destination in channels(placement):
            if rank in (source, destination):
                name = f"megatron.zero_bubble/{pipeline_ranks[source]}->{pipeline_ranks[destination]}"
                self._groups[source, destination] = _pair_group(name, int(rank == destination), device, timeout)
        self._open(device)

    def _open(self, device: torch.device) -> None:
        """Send one number through every channel, so that none is connected in the middle of a step.

        NCCL connects a pair at its first message and blocks both ends while it does. All ranks go
        through their channels in the same order, so these meetings cannot wait in a circle.
        """
        for source, destination in self._groups:
            probe = torch.full((1,), float(source), device=device)
            if source == self._rank:
                self.send(probe, destination).wait()
            else:
                arrived = self.receive(source, TensorSpec((1,), probe.dtype, device)).wait()
                assert arrived.item() == source, f"channel {source}->{destination} is crossed with another"

    def close(self) -> None:
        """Shut the channels down; nothing may be under way. NCCL complains at exit of those that are still open."""
        for group in self._groups.values():
            group.shutdown()
        self._groups = {}

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        message = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        work = self._groups[self._rank, destination].send([message], _DESTINATION, 0)
        # The sender may take the values from its tensor. Only now, because the receiver waits for the message.
        return _TorchSend(work, message.detach())

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        buffer = spec.empty()
        return _TorchReceive(self._groups[source, self._rank].recv([buffer], _SOURCE, 0), buffer)


_SOURCE, _DESTINATION = 0, 1
"""Ranks within a channel's group."""


def _pair_group(name: str, rank: int, device: torch.device, timeout: timedelta) -> Any:
    """The backend of one channel (a `ProcessGroupNCCL` or `ProcessGroupGloo`), met by name in the job's store.

    `dist.new_group` is not for this: it wants every rank of the job to call it for every pair. Its
    `use_local_synchronization` lifts that, but names the group by how many groups the caller is a
    member of, which differs between the ends of a pipeline: they then wait for each other for ever.
    """
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    # Both ends count their groups of this name, so that a second communicator does not meet the first one's keys.
    generation = store.add(f"generation of {rank}", 1)
    store = dist.PrefixStore(str(generation), store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    return dist.ProcessGroupGloo(store, rank, 2, timeout)


@dataclass(frozen=True)
class _TorchSend:
    """Holds the message until NCCL has read it; gloo says that it is done only once it has been waited for."""

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


class InMemoryNetwork:
    """Channels between the threads of one process: the executor's tests need no processes.

    As on a real network a receive gets its message by when it was posted, not by when it is waited for.

    Args:
        num_ranks: number of pipeline ranks.
        timeout: seconds after which a receive whose message never comes raises `TimeoutError`.
    """

    def __init__(self, num_ranks: int, timeout: float = 30.0) -> None:
        self.timeout = timeout
        ranks = range(num_ranks)
        self._channels = {(source, destination): _InMemoryChannel() for source in ranks for destination in ranks}

    def communicator(self, rank: int) -> InMemoryCommunicator:
        return InMemoryCommunicator(self, rank)

    def put(self, source: int, destination: int, tensor: torch.Tensor) -> None:
        """Send."""
        self._channels[source, destination].put(tensor)

    def post(self, source: int, destination: int) -> Future[torch.Tensor]:
        """Ask for the next message of the channel that nobody has asked for."""
        return self._channels[source, destination].post()

    def close(self, error: BaseException) -> None:
        """A rank has failed: every receive without a message raises `error`, now and from now on."""
        for channel in self._channels.values():
            channel.close(error)

    def undelivered(self) -> list[tuple[int, int]]:
        """Channels that hold messages nobody has asked for."""
        return [ends for ends, channel in self._channels.items() if channel.messages]


class _InMemoryChannel:
    """The messages that wait for a receive, or the receives that wait for a message; never both."""

    def __init__(self) -> None:
        self.messages: deque[torch.Tensor] = deque()
        self._receives: deque[Future[torch.Tensor]] = deque()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def put(self, tensor: torch.Tensor) -> None:
        with self._lock:
            if self._receives:
                self._receives.popleft().set_result(tensor)
            else:
                self.messages.append(tensor)

    def post(self) -> Future[torch.Tensor]:
        receive: Future[torch.Tensor] = Future()
        with self._lock:
            if self.messages:
                receive.set_result(self.messages.popleft())
            elif self._error is not None:
                receive.set_exception(self._error)
            else:
                self._receives.append(receive)
        return receive

    def close(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            while self._receives:
                self._receives.popleft().set_exception(error)


@dataclass(frozen=True)
class InMemoryCommunicator:
    """One rank's end of an `InMemoryNetwork`."""

    network: InMemoryNetwork
    rank: int

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        self.network.put(self.rank, destination, tensor.detach().clone())
        return _Delivered()

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        message = self.network.post(source, self.rank)
        return _InMemoryReceive(message, spec, f"rank {self.rank}: no message from rank {source}", self.network.timeout)


@dataclass(frozen=True)
class _Delivered:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


@dataclass(frozen=True)
class _InMemoryReceive:
    message: Future[torch.Tensor]
    spec: TensorSpec
    problem: str
    timeout: float

    def wait(self) -> torch.Tensor:
        try:
            tensor = self.message.result(self.timeout)
        except FutureTimeoutError:
            raise TimeoutError(f"{self.problem} in {self.timeout} s") from None
        expected = (self.spec.shape, self.spec.dtype)
        assert (tuple(tensor.shape), tensor.dtype) == expected, f"expected {expected}, got {tensor.shape}"
        return tensor
