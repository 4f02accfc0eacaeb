"""NCCL's rules between the threads of one process, in an order that a seed decides.

What gloo forgives and NCCL does not shows here:

- the buffer of a receive holds NaN until `wait()`;
- a message is read from the sender's memory when it is delivered, which may be long after `send()`: it is NaN if
  that memory has been given back by then;
- a message is delivered once both ends have posted it and the one before it on its channel has arrived;
- a sender learns late that its message has gone.

One thread runs at a time. Whenever it calls the network, the seed says who goes on, a rank or a message, and each
channel has a pace of its own: a seed that finds a fault finds it again.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from megatron.zero_bubble.runtime.communicator import TorchCommunicator
from megatron.zero_bubble.runtime.process_group import Membership
from megatron.zero_bubble.schedule import Placement

CPU = torch.device("cpu")
NAN = float("nan")
PACES = (0.02, 0.3, 5.0)
"""Chances of a message to be delivered next, relative to the chance 1 of each rank that can continue."""
LATE = (0, 1, 5, 50)
"""Numbers of times that a sender is told that a delivered message is still under way."""


class Fault(Exception):
    """The ranks broke NCCL's rules."""


class SimulatedNccl:
    """Channels between threads; `run` is one step of all ranks."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self._num_ranks = num_ranks
        self._channels: dict[tuple[str, int, int], _Channel] = {}
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}
        self._faults: list[str] = []
        self._error: BaseException | None = None

    def communicators(self, placement: Placement, purpose: str = "") -> list[TorchCommunicator]:
        """A communicator of every rank: the one that jobs use, with another network behind it."""
        new = partial(TorchCommunicator, range(self._num_ranks), placement=placement, device=CPU)
        options = {"timeout": timedelta(seconds=10), "connect": partial(self._connect, purpose)}
        return self.run([partial(new, rank, **options) for rank in range(self._num_ranks)])

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the function of each rank in a thread of its own, and return what they return.

        Raises:
            Fault: a message was released before it was delivered, or was not received or waited for; or the
                ranks wait for each other.
        """
        self._waits = {rank: (lambda: True, "") for rank in range(self._num_ranks)}
        with ThreadPoolExecutor(self._num_ranks) as pool:
            results = [pool.submit(self._run_rank, rank, function) for rank, function in enumerate(functions)]
            self._turns[self._draw()].release()
        if self._error is not None:
            raise self._error
        faults = self._faults + [fault for channel in self._channels.values() for fault in channel.leftovers()]
        if faults:
            raise Fault("; ".join(faults))
        return [result.result() for result in results]

    def pass_turn(self, rank: int, until: Callable[[], bool] = lambda: True, what: str = "") -> None:
        """Called by a rank's thread: let the others go on, at least until `until()`."""
        self._waits[rank] = (until, what)
        try:
            drawn = self._draw()
        except Fault as fault:
            self._end(fault)
            raise
        if drawn != rank:
            self._turns[drawn].release()
            self._turns[rank].acquire()
        if self._error is not None:
            raise Fault("another rank has failed") from self._error

    def report(self, fault: str) -> None:
        self._faults.append(fault)

    def _connect(self, purpose: str, end: Membership) -> _Group:
        ends = end.members
        key = (purpose, *ends)
        if key not in self._channels:
            self._channels[key] = _Channel(self, f"{purpose}{ends[0]}->{ends[1]}")
        return _Group(self._channels[key], ends[end.rank])

    def _run_rank(self, rank: int, function: Callable[[], Any]) -> Any:
        self._turns[rank].acquire()
        if self._error is not None:
            return None
        try:
            result = function()
        except BaseException as error:
            self._end(error)
            return None
        del self._waits[rank]
        if self._waits:
            try:
                self._turns[self._draw()].release()
            except Fault as fault:
                self._end(fault)
        return result

    def _end(self, error: BaseException) -> None:
        """Stop all ranks, and keep the first error to raise it."""
        if self._error is None:
            self._error = error
            for turn in self._turns:
                turn.release()

    def _draw(self) -> int:
        """Deliver messages until the lot falls on a rank."""
        while True:
            ranks = [rank for rank, (is_over, _) in self._waits.items() if is_over()]
            channels = [channel for channel in self._channels.values() if channel.can_deliver()]
            if not ranks and not channels:
                waits = "; ".join(f"rank {rank} waits for {what}" for rank, (_, what) in self._waits.items())
                raise Fault(f"the ranks stand still: {waits}")
            lots = [1.0] * len(ranks) + [channel.pace for channel in channels]
            drawn = self.random.choices([*ranks, *channels], lots)[0]
            if isinstance(drawn, int):
                return drawn
            drawn.deliver()


class _Channel:
    """The messages and the receives of one channel that have not met, each in the order in which they were posted."""

    def __init__(self, network: SimulatedNccl, name: str) -> None:
        self.network, self.name = network, name
        self.pace = network.random.choice(PACES)
        self.sends: deque[_Send] = deque()
        self.receives: deque[_Receive] = deque()
        self.waiting: list[_Receive] = []
        self._num_posted = [0, 0]

    def number(self, is_send: bool) -> str:
        """The name of the next message that is sent, or of the next that is received."""
        self._num_posted[is_send] += 1
        return f"message {self._num_posted[is_send]} of channel {self.name}"

    def can_deliver(self) -> bool:
        return bool(self.sends and self.receives)

    def deliver(self) -> None:
        send, receive = self.sends.popleft(), self.receives.popleft()
        receive.values = send.read()
        self.waiting.append(receive)

    def leftovers(self) -> list[str]:
        found = [f"{send.name} was not received" for send in self.sends]
        found += [f"{receive.name} was not waited for" for receive in (*self.waiting, *self.receives)]
        self.sends.clear()
        self.receives.clear()
        self.waiting.clear()
        return found


class _Group:
    """A rank's end of a channel, with the interface of torch.distributed's backends."""

    def __init__(self, channel: _Channel, rank: int) -> None:
        self._channel, self._rank = channel, rank

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> _Send:
        send = _Send(self._channel, self._rank, tensors[0])
        self._channel.sends.append(send)
        self._channel.network.pass_turn(self._rank)
        return send

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Receive:
        receive = _Receive(self._channel, self._rank, tensors[0])
        self._channel.receives.append(receive)
        self._channel.network.pass_turn(self._rank)
        return receive

    def shutdown(self) -> None:
        assert not self._channel.can_deliver(), f"channel {self._channel.name} is shut down with messages under way"


def _nothing(dtype: torch.dtype) -> float:
    """What a message of this type must never arrive as."""
    return NAN if dtype.is_floating_point else -1


class SentMemory:
    """The memory that holds the values of a message. It is not kept alive, so that its release can be noticed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._layout = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype, self._num_bytes = tensor.dtype, tensor.untyped_storage().nbytes()

    def read(self) -> tuple[torch.Tensor, bool]:
        """A copy of the values as they are now; NaN, and False, if the memory has been given back."""
        storage = self._storage()
        if storage is None or storage.nbytes() < self._num_bytes:
            return torch.empty(self._layout[1], dtype=self._dtype).fill_(_nothing(self._dtype)), False
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout).clone(), True


class _Send:
    """A message under way."""

    def __init__(self, channel: _Channel, rank: int, tensor: torch.Tensor) -> None:
        self._network, self._rank, self.name = channel.network, rank, channel.number(True)
        self._memory = SentMemory(tensor)
        self._is_delivered = False
        self._num_late = channel.network.random.choice(LATE)

    def read(self) -> torch.Tensor:
        """Deliver the message: return the values that its memory holds now."""
        self._is_delivered = True
        values, is_there = self._memory.read()
        if not is_there:
            self._network.report(f"{self.name} was released before it was delivered")
        return values

    def is_completed(self) -> bool:
        self._network.pass_turn(self._rank)
        if self._is_delivered and self._num_late > 0:
            self._num_late -= 1
            return False
        return self._is_delivered

    def wait(self) -> None:
        self._network.pass_turn(self._rank, lambda: self._is_delivered, f"{self.name} to be received")
        self._num_late = 0


class _Receive:
    """A buffer that will be filled."""

    def __init__(self, channel: _Channel, rank: int, buffer: torch.Tensor) -> None:
        self._channel, self._rank, self.name = channel, rank, channel.number(False)
        self._buffer = buffer.fill_(_nothing(buffer.dtype))
        self.values: torch.Tensor | None = None

    def wait(self) -> None:
        self._channel.network.pass_turn(self._rank, lambda: self.values is not None, f"{self.name} to be sent")
        assert self.values is not None
        if self in self._channel.waiting:
            self._channel.waiting.remove(self)
        expected, arrived = (self._buffer.shape, self._buffer.dtype), (self.values.shape, self.values.dtype)
        assert expected == arrived, f"{self.name}: expected {expected}, got {arrived}"
        self._buffer.copy_(self.values)
