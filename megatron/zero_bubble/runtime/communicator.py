"""The point-to-point seam: tensors between neighbouring pipeline ranks.

Each ordered pair of ranks that exchange messages is a *channel*: a message on one channel never waits
for one on another, and messages of one channel arrive in the order in which they were sent. What
that order is, both ends read from the lowered schedule.

`TorchCommunicator` runs on torch.distributed; `in_memory.py` has one between threads of one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.schedule import Placement


@dataclass(frozen=True)
class TensorSpec:
    """Shape, type and device of a message, which its receiver must know before it arrives."""

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


_SOURCE, _DESTINATION = 0, 1
"""Ranks within a channel's group."""
MAX_BLOCKS = 4
"""Thread blocks that a message may occupy on a GPU. A receive holds them from when it is posted until it is met."""


@dataclass(frozen=True)
class ChannelEnd:
    """One end of a channel, as its process group needs to know it."""

    source: int
    """Global rank of the sender; `destination` is that of the receiver."""
    destination: int
    rank: int
    """Which end this is: 0 for the source, 1 for the destination."""
    device: torch.device
    timeout: timedelta

    @property
    def name(self) -> str:
        return f"megatron.zero_bubble/{self.source}->{self.destination}"


class PairGroup(Protocol):
    """A process group of two, as far as a channel uses it; the backends of torch.distributed fit."""

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any: ...

    def shutdown(self) -> None: ...


def connect_pair(end: ChannelEnd) -> Any:
    """Connect one channel's backend, a `ProcessGroupNCCL` or `ProcessGroupGloo`, by name in the job's store.

    `dist.new_group` is not for this: it wants every rank of the job to call it for every pair. Its
    `use_local_synchronization` lifts that, but names the group by how many groups the caller is a
    member of, which differs between the ends of a pipeline: they then wait for each other for ever.
    """
    store = dist.PrefixStore(end.name, dist.distributed_c10d._get_default_store())
    # Both ends count their groups of this name, so that a second communicator does not meet the first one's keys.
    generation = store.add(f"generation of {end.rank}", 1)
    store = dist.PrefixStore(str(generation), store)
    if end.device.type == "cuda":
        return dist.ProcessGroupNCCL(store, end.rank, 2, _nccl_options(end))
    return dist.ProcessGroupGloo(store, end.rank, 2, end.timeout)


def _nccl_options(end: ChannelEnd) -> Any:
    """Give messages priority over computing and few thread blocks: the other rank waits for them.

    The flight recorder knows the channel by the name and the ranks.
    """
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = end.timeout
    options.config.max_ctas = MAX_BLOCKS
    options.group_name = end.name
    options.global_ranks_in_group = [end.source, end.destination]
    return options


class Mark(Protocol):
    """A point of the computation."""

    def synchronize(self) -> None:
        """Wait until it has been reached."""
        ...


class RunAhead:
    """Keeps the process that feeds a GPU at most `limit` messages ahead of it.

    A message takes memory from when the process posts it until the GPU has been there, and a process that nothing
    holds back posts all messages of a step within the time of some operations.

    Args:
        new_mark: marks the point that the computation is fed up to.
        limit: a GPU that is behind by this many messages has some operations to do meanwhile.
    """

    def __init__(self, new_mark: Callable[[], Mark], limit: int = 8) -> None:
        self._new_mark, self._limit = new_mark, limit
        self._marks: deque[Mark] = deque()

    def before_message(self) -> None:
        """Wait for the GPU to come to where the message `limit` before this one was posted."""
        if len(self._marks) == self._limit:
            self._marks.popleft().synchronize()
        self._marks.append(self._new_mark())


def _cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


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
        connect: makes the process group behind a channel; `connect_pair` by default.
        run_ahead: holds the process back; given for a GPU, where nothing else is.
    """

    def __init__(
        self,
        pipeline_ranks: Sequence[int],
        rank: int,
        placement: Placement,
        device: torch.device,
        timeout: timedelta,
        connect: Callable[[ChannelEnd], PairGroup] | None = None,
        run_ahead: RunAhead | None = None,
    ) -> None:
        self._rank = rank
        self._run_ahead = run_ahead or (RunAhead(_cuda_mark) if device.type == "cuda" else None)
        self._groups: dict[tuple[int, int], PairGroup] = {}
        connect = connect or connect_pair
        for ends in channels(placement):
            if rank in ends:
                source, destination = (pipeline_ranks[end] for end in ends)
                self._groups[ends] = connect(ChannelEnd(source, destination, ends.index(rank), device, timeout))
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
        self._hold_back()
        message = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        work = self._groups[self._rank, destination].send([message], _DESTINATION, 0)
        # The sender may take the values from its tensor. Only now, because the receiver waits for the message.
        return _TorchSend(work, message.detach())

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        self._hold_back()
        buffer = spec.empty()
        return _TorchReceive(self._groups[source, self._rank].recv([buffer], _SOURCE, 0), buffer)

    def _hold_back(self) -> None:
        if self._run_ahead is not None:
            self._run_ahead.before_message()


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
