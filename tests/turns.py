"""Runs the ranks of a pipeline as threads of one process, one thread at a time.

megatron-core keeps global state, that of random numbers among others, and its functions expect to find this state as
they left it. So a rank keeps its turn until it has to wait for a message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import torch

from megatron.zero_bubble.runtime.communicator import Communicator, PendingReceive, PendingSend, TensorSpec
from tests.runtime.in_memory import InMemoryNetwork

Result = TypeVar("Result")

_TIMEOUT = 300.0
"""Seconds that a rank waits for a message."""


def run_in_turns(num_ranks: int, run: Callable[[int, Communicator], Result]) -> list[Result]:
    """Call `run(rank, communicator)` for every rank and return the results.

    Raises:
        BaseException: the first that a rank raised; the other ranks end as soon as they wait for a message.
    """
    network, turn = InMemoryNetwork(num_ranks, _TIMEOUT), threading.Lock()

    def take_part(rank: int) -> Result:
        with turn:
            return run(rank, _InTurns(network.communicator(rank), turn))

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(take_part, rank) for rank in range(num_ranks)]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            error = future.exception()
            if error is not None:
                network.close(error)
                raise error
    return [future.result() for future in futures]


@dataclass(frozen=True)
class _InTurns:
    """A communicator that gives the turn to another rank while it waits for a message."""

    communicator: Communicator
    turn: threading.Lock

    def send(self, tensor: torch.Tensor, destination: int) -> PendingSend:
        return self.communicator.send(tensor, destination)

    def receive(self, source: int, spec: TensorSpec) -> PendingReceive:
        return _InTurnsReceive(self.communicator.receive(source, spec), self.turn)


@dataclass(frozen=True)
class _InTurnsReceive:
    receive: PendingReceive
    turn: threading.Lock

    def wait(self) -> torch.Tensor:
        self.turn.release()
        try:
            return self.receive.wait()
        finally:
            self.turn.acquire()
