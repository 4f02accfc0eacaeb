"""Channels through host memory keep the promises of the others; CUDA is stood in for by recorded calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.communicator import HostCommunicator, TensorSpec
from megatron.zero_bubble.schedule import Placement
from tests.runtime.test_communicator import CPU, SPEC, exchange, message


@pytest.fixture
def both_ends() -> Iterator[list[HostCommunicator]]:
    """The communicators of both ranks of a pipeline in this one process, which meet through a store in memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ends: dict[int, HostCommunicator] = {}

    def open_end(rank: int) -> None:
        ends[rank] = HostCommunicator(range(2), rank, Placement("linear", 2), CPU, timedelta(seconds=20))

    in_threads(open_end)
    yield [ends[0], ends[1]]
    dist.destroy_process_group()


def in_threads(run: Any) -> None:
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_arrive_in_the_order_of_their_channel(both_ends, dtype):
    spec = TensorSpec((2, 3), dtype, CPU)
    in_threads(lambda rank: exchange(both_ends[rank], rank, Placement("linear", 2), spec))


def test_a_message_has_the_values_of_when_it_was_sent(both_ends):
    """A part of a tensor, which then loses its storage, as a stage's output does."""
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_()
    output = whole.t()[:2]
    expected = output.detach().clone()
    receive = both_ends[1].receive(0, SPEC)
    send = both_ends[0].send(output, 1)
    whole.data.zero_()
    output.data = torch.empty(1)
    arrived = receive.wait()
    send.wait()
    assert torch.equal(arrived, expected)
    assert not arrived.requires_grad, "the executor decides what needs a gradient"


def test_a_gpus_messages_are_pinned_and_copied_back_to_it(both_ends, monkeypatch):
    """The calls that torch would get on a GPU; here host memory takes the place of the device's."""
    calls = []
    empty, to = torch.empty, torch.Tensor.to

    def recording_empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        calls.append(("pinned" if pin_memory else "pageable", options.get("device")))
        return empty(*args, **options)

    def recording_to(tensor: torch.Tensor, device: Any, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(("to", device))
        return to(tensor, CPU, *args, **options)

    monkeypatch.setattr(torch, "empty", recording_empty)
    monkeypatch.setattr(torch.Tensor, "to", recording_to)
    gpu = torch.device("cuda", 0)
    receive = both_ends[1].receive(0, TensorSpec(SPEC.shape, SPEC.dtype, gpu))
    assert calls == [("pinned", None)], "the buffer of a receive is on the host"
    both_ends[0].send(message(0, 1, 1), 1).wait()
    assert torch.equal(receive.wait(), message(0, 1, 1))
    assert calls == [("pinned", None), ("pageable", None), ("to", gpu)]
