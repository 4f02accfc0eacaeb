"""Channels: over gloo between real processes (one job a world size), and in memory."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from simulated_nccl import SimulatedNccl

from megatron.zero_bubble.runtime.communicator import (
    TensorSpec,
    TorchCommunicator,
    channels,
)
from megatron.zero_bubble.schedule import Placement
from tests.runtime.messages import CPU, SPEC, exchange, message


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (Placement("linear", 1), []),
        (Placement("linear", 2), [(0, 1), (1, 0)]),
        (Placement("linear", 4), [(0, 1), (1, 0), (2, 3), (3, 2), (1, 2), (2, 1)]),
        (Placement("interleaved", 2, 2), [(0, 1), (1, 0)]),
        (Placement("interleaved", 3, 2), [(0, 1), (0, 2), (1, 0), (2, 0), (1, 2), (2, 1)]),
        (Placement("interleaved", 4, 2), [(0, 1), (0, 3), (1, 0), (2, 3), (3, 0), (3, 2), (1, 2), (2, 1)]),
        (Placement("interleaved", 1, 3), []),
        (Placement("v", 2, 2), [(0, 1), (1, 0)]),
        (Placement("v", 4, 2), [(0, 1), (1, 0), (2, 3), (3, 2), (1, 2), (2, 1)]),
        (Placement("v", 1, 2), []),
    ],
    ids=lambda value: f"{value.kind} p={value.num_ranks} v={value.num_chunks}" if isinstance(value, Placement) else "",
)
def test_channels_are_the_ordered_pairs_of_ranks_that_hold_neighbouring_stages(placement, expected):
    assert channels(placement) == expected


def rounds_to_open(placement: Placement) -> int:
    """Rounds in which all channels open, where a rank opens one channel a round, in order."""
    busy_until = [0] * placement.num_ranks
    for ends in channels(placement):
        both = max(busy_until[rank] for rank in ends) + 1
        for rank in ends:
            busy_until[rank] = both
    return max(busy_until)


@pytest.mark.parametrize("kind", ["linear", "interleaved", "v"])
def test_opening_the_channels_takes_no_longer_on_more_ranks(kind):
    rounds = {rounds_to_open(Placement(kind, p, 1 if kind == "linear" else 2)) for p in (4, 8, 64, 1024)}
    assert len(rounds) == 1
    assert rounds.pop() <= 8


def over_gloo(placement: Placement, rank: int, timeout: float = 60.0) -> TorchCommunicator:
    return TorchCommunicator(range(placement.num_ranks), rank, placement, CPU, timedelta(seconds=timeout))


def job(rank: int, num_ranks: int, store: str) -> None:
    """Run one process of the job; an assertion that fails in it fails the test."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout)
    linear = Placement("linear", num_ranks)
    first = over_gloo(linear, rank)
    exchange(first, rank, linear)
    exchange(first, rank, linear, TensorSpec((4, 1), torch.bfloat16, CPU))
    for other in (Placement("interleaved", num_ranks, 2), Placement("v", num_ranks, 2)):
        exchange(over_gloo(other, rank), rank, other)
    exchange(first, rank, linear)  # the ones opened meanwhile have not taken its place
    if num_ranks == 2:
        a_view_is_sent_as_its_values(first, rank)
        a_sent_tensor_may_lose_its_storage(first, rank)
        a_channel_is_not_blocked_by_the_other_direction(first, rank)
    else:
        a_pipeline_of_some_of_the_ranks(rank)
    dist.barrier()
    if num_ranks == 2:
        a_dead_rank_ends_the_wait(first, rank)
    dist.destroy_process_group()


def a_view_is_sent_as_its_values(communicator: TorchCommunicator, rank: int) -> None:
    """A part, a lazy conjugate, which has the memory of its base, and the lazy negative of an imaginary part."""
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_()
    both = torch.complex(whole, 1 - whole)
    for view in (whole.t()[:2], both[:2, :3].conj(), both.conj(), both.conj().imag):
        if rank == 0:
            communicator.send(view, 1).wait()
        else:
            arrived = communicator.receive(0, TensorSpec(tuple(view.shape), view.dtype, CPU)).wait()
            assert torch.equal(arrived, view)
            assert not arrived.requires_grad, "the executor decides what needs a gradient"


def a_sent_tensor_may_lose_its_storage(communicator: TorchCommunicator, rank: int) -> None:
    """A message keeps its values until it has arrived, although megatron-core frees a stage's output before that."""
    if rank == 0:
        output = message(0, 1, 5)
        send = communicator.send(output, 1)
        output.data = torch.empty(1)
        torch.full(SPEC.shape, 7.0)  # what may take the memory, were it free
        dist.barrier()
        send.wait()
    else:
        dist.barrier()
        assert torch.equal(communicator.receive(0, SPEC).wait(), message(0, 1, 5))


def a_channel_is_not_blocked_by_the_other_direction(communicator: TorchCommunicator, rank: int) -> None:
    """Both ranks post a receive before either sends."""
    receive = communicator.receive(1 - rank, SPEC)
    dist.barrier()
    send = communicator.send(message(rank, 1 - rank, 9), 1 - rank)
    assert torch.equal(receive.wait(), message(1 - rank, rank, 9))
    send.wait()


def a_pipeline_of_some_of_the_ranks(rank: int) -> None:
    """Two pipelines of two ranks in one job of four: peers are pipeline ranks, and nobody else takes part."""
    placement = Placement("linear", 2)
    pipeline = [0, 2] if rank % 2 == 0 else [1, 3]
    time.sleep(0.3 * [0, 1, 3, 2][rank])  # each pipeline's first rank meets the other's last one first
    communicator = TorchCommunicator(pipeline, pipeline.index(rank), placement, CPU, timedelta(seconds=60))
    exchange(communicator, pipeline.index(rank), placement)
    if rank < 2:
        communicator.send(torch.full(SPEC.shape, float(rank)), 1).wait()
    else:
        assert communicator.receive(0, SPEC).wait()[0, 0] == pipeline[0]


def a_dead_rank_ends_the_wait(communicator: TorchCommunicator, rank: int) -> None:
    """A wait for a dead rank ends long before the timeout."""
    if rank == 1:
        os._exit(0)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
        communicator.receive(1, SPEC).wait()
    assert time.monotonic() - started < 30
    os._exit(0)  # leaving the group would wait for the dead rank


# Trainings on four ranks, of tests/cli/test_check_ranks.py, send over the same channels.
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_torch_channels_between_processes(num_ranks: int, tmp_path: Path):
    torch.multiprocessing.spawn(job, (num_ranks, str(tmp_path / "store")), nprocs=num_ranks)


def test_a_message_that_nobody_sends_ends_the_wait_after_the_timeout():
    """Both ranks are in this process, where their channels meet through a store in memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        placement = Placement("linear", 2)
        both: dict[int, TorchCommunicator] = {}
        threads = [
            threading.Thread(target=lambda r=rank: both.update({r: over_gloo(placement, r, timeout=2.0)}))
            for rank in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            both[1].receive(0, SPEC).wait()
        assert 1.5 < time.monotonic() - started < 20
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("placement", [Placement("linear", 4), Placement("v", 3, 2), Placement("interleaved", 4, 2)])
def test_by_nccls_rules_what_is_sent_arrives(placement, seed):
    network = SimulatedNccl(placement.num_ranks, seed)
    ends = network.communicators(placement)
    network.run([partial(exchange, end, rank, placement) for rank, end in enumerate(ends)])
    for end in ends:
        end.close()
