"""Ranks that are threads, one at a time."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble.cli.check.turns import run_in_turns
from megatron.zero_bubble.runtime.communicator import Communicator, TensorSpec

SPEC = TensorSpec((1,), torch.float32, torch.device("cpu"))


def test_a_rank_runs_alone_until_it_waits_for_a_message():
    running: set[int] = set()
    waited: list[int] = []

    def run(rank: int, communicator: Communicator) -> float:
        value = torch.zeros(1)
        for _ in range(20):
            assert not running, "another rank has the turn"
            running.add(rank)
            value = value + rank + 1
            communicator.send(value, (rank + 1) % 3)
            receive = communicator.receive((rank - 1) % 3, SPEC)
            running.remove(rank)
            value = receive.wait()
            waited.append(rank)
        return float(value)

    # Each value has gone round: every rank added to it in every third turn.
    values = run_in_turns(3, run)
    assert sum(values) == 20 * (1 + 2 + 3)
    assert sorted(waited) == [0] * 20 + [1] * 20 + [2] * 20


def test_when_one_fails_nobody_waits_for_it():
    def run(rank: int, communicator: Communicator) -> None:
        if rank == 1:
            raise ValueError("rank 1 gives up")
        communicator.receive(1, SPEC).wait()

    with pytest.raises(ValueError, match="rank 1 gives up"):
        run_in_turns(3, run)
