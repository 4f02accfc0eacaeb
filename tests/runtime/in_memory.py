"""Messages and collectives between the threads of one process, which form a pipeline."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # from Python 3.11 on, the builtin TimeoutError
from dataclasses import dataclass

import torch

from megatron.zero_bubble.runtime.collectives import sum_in_order
from megatron.zero_bubble.runtime.communicator import PendingReceive, PendingSend, TensorSpec
from megatron.zero_bubble.runtime.made_up_neighbours import Delivered


class InMemoryNetwork:
    """The channels between the threads of one process.

    As with torch.distributed, messages arrive in the order in which their receives were posted, whatever the order of
    the waits.

    Args:
        num_ranks: number of pipeline ranks.
        timeout: seconds after which a receive without a message raises `TimeoutError`.
    """

    def __init__(self, num_ranks: int, timeout: float = 30.0) -> None:
        self.timeout = timeout
        ranks = range(num_ranks)
        self._channels = {(source, destination): _InMemoryChannel() for source in ranks for destination in ranks}

    def communicator(self, rank: int) -> InMemoryCommunicator:
        return InMemoryCommunicator(self, rank)

    def put(self, source: int, destination: int, tensor: torch.Tensor) -> None:
        """Send a message."""
        self._channels[source, destination].put(tensor)

    def post(self, source: int, destination: int) -> Future[torch.Tensor]:
        """Post a receive; the n-th posted receive of a channel takes the channel's n-th message."""
        return self._channels[source, destination].post()

    def close(self, error: BaseException) -> None:
        """Make every receive without a message raise `error` from now on, because a rank has failed."""
        for channel in self._channels.values():
            channel.close(error)

    def undelivered(self) -> list[tuple[int, int]]:
        """Return the channels that hold messages for which no receive was posted."""
        return [ends for ends, channel in self._channels.items() if channel.messages]


class _InMemoryChannel:
    """A channel: a queue of messages that wait for a receive, or a queue of receives that wait for a message."""

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
        return Delivered()

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        message = self.network.post(source, self.rank)
        return _InMemoryReceive(message, spec, f"rank {self.rank}: no message from rank {source}", self.network.timeout)


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


class InMemoryCollectives:
    """Collectives between threads of one process.

    Args:
        network: the channels of the group; no other code may use these channels.
        rank: this thread's index in the group.
        size: the number of ranks in the group.
    """

    def __init__(self, network: InMemoryNetwork, rank: int, size: int) -> None:
        self._network, self._end = network, network.communicator(rank)
        self.rank, self.size = rank, size

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.rank == root:
            self._send_all([tensor] * self.size)
        tensor.detach().copy_(self._receive(tensor, root))

    def gather_all(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        self._send_all([tensor] * self.size)
        for source, part in enumerate(gathered):
            part.copy_(self._receive(tensor, source))

    def sum_to(self, tensor: torch.Tensor, root: int) -> None:
        self._end.send(tensor, root)
        if self.rank == root:
            sum_in_order([self._receive(tensor, source) for source in range(self.size)], tensor)

    def close(self) -> None:
        self._network.close(ConnectionError(f"rank {self.rank} has left the group of collectives"))

    def _send_all(self, tensors: Sequence[torch.Tensor]) -> None:
        for destination, tensor in enumerate(tensors):
            self._end.send(tensor, destination)

    def _receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        return self._end.receive(source, TensorSpec(tuple(like.shape), like.dtype, like.device)).wait()
