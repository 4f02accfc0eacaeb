"""Channels between the threads of one process."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.multiprocessing

from megatron.zero_bubble.runtime.communicator import (
    TensorSpec,
)
from megatron.zero_bubble.schedule import Placement
from tests.runtime.in_memory import InMemoryNetwork
from tests.runtime.messages import CPU, SPEC, exchange, message


class TestInMemory:
    @pytest.mark.parametrize(
        "placement", [Placement("linear", 4), Placement("v", 3, 2), Placement("interleaved", 2, 2)]
    )
    def test_it_keeps_the_promises_of_the_real_one(self, placement):
        network = InMemoryNetwork(placement.num_ranks, timeout=5.0)
        errors: list[BaseException] = []

        def rank_thread(rank: int) -> None:
            try:
                exchange(network.communicator(rank), rank, placement)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(placement.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert network.undelivered() == []

    def test_a_message_is_a_copy(self):
        network = InMemoryNetwork(2)
        sent = message(0, 1, 1).requires_grad_()
        network.communicator(0).send(sent, 1)
        sent.data.zero_()
        arrived = network.communicator(1).receive(0, SPEC).wait()
        assert torch.equal(arrived, message(0, 1, 1))
        assert not arrived.requires_grad

    def test_a_message_that_nobody_sends_is_a_timeout(self):
        receive = InMemoryNetwork(2, timeout=0.05).communicator(1).receive(0, SPEC)
        with pytest.raises(TimeoutError, match=r"rank 1: no message from rank 0 in 0\.05 s"):
            receive.wait()

    def test_nobody_waits_for_a_rank_that_has_failed(self):
        network = InMemoryNetwork(3)
        network.communicator(0).send(message(0, 1, 0), 1)
        posted = network.communicator(1).receive(2, SPEC)
        network.close(RuntimeError("rank 2 is gone"))
        with pytest.raises(RuntimeError, match="rank 2 is gone"):
            posted.wait()
        with pytest.raises(RuntimeError, match="rank 2 is gone"):
            network.communicator(0).receive(2, SPEC).wait()
        assert torch.equal(network.communicator(1).receive(0, SPEC).wait(), message(0, 1, 0)), "sent before"

    @pytest.mark.parametrize("spec", [TensorSpec((3, 2), torch.float32, CPU), TensorSpec((2, 3), torch.bfloat16, CPU)])
    def test_a_receive_that_expects_another_message_is_refused(self, spec):
        network = InMemoryNetwork(2)
        network.communicator(0).send(message(0, 1, 0), 1)
        with pytest.raises(AssertionError, match="expected"):
            network.communicator(1).receive(0, spec).wait()

    def test_it_knows_the_channels_with_messages_that_nobody_asked_for(self):
        network = InMemoryNetwork(3)
        network.communicator(2).send(message(2, 1, 0), 1)
        assert network.undelivered() == [(2, 1)]
        network.communicator(1).receive(2, SPEC)
        assert network.undelivered() == []
