"""Messages whose values tell where they come from, and a rank that sends and receives one of each."""

from __future__ import annotations

import torch
import torch.multiprocessing

from megatron.zero_bubble.runtime.communicator import (
    Communicator,
    TensorSpec,
    channels,
)
from megatron.zero_bubble.schedule import Placement

CPU = torch.device("cpu")
SPEC = TensorSpec((2, 3), torch.float32, CPU)


def message(source: int, destination: int, index: int, spec: TensorSpec = SPEC) -> torch.Tensor:
    return torch.full(spec.shape, source * 100.0 + destination * 10 + index, dtype=spec.dtype)


def exchange(communicator: Communicator, rank: int, placement: Placement, spec: TensorSpec = SPEC) -> None:
    """Every rank sends three messages on each of its channels before it waits for any, and checks what arrives."""
    sends, receives = [], []
    for source, destination in channels(placement):
        for index in range(3):
            if rank == source:
                sends.append(communicator.send(message(source, destination, index, spec), destination))
            elif rank == destination:
                receives.append((message(source, destination, index, spec), communicator.receive(source, spec)))
    for expected, receive in reversed(receives):  # a message is the one of its receive, whenever that is waited for
        arrived = receive.wait()
        assert (arrived.dtype, arrived.shape) == (spec.dtype, spec.shape)
        assert torch.equal(arrived, expected)
    for send in sends:
        send.wait()
        assert send.is_done()
