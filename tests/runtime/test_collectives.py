"""Collectives: over gloo between real processes, and between threads of one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron.zero_bubble.runtime.collectives import Collectives, TorchCollectives
from tests.runtime.in_memory import InMemoryCollectives, InMemoryNetwork
from tests.runtime.messages import CPU

TIMEOUT = timedelta(seconds=60)


def values(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of every size, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(4, 3, generator=generator) * 10.0 ** (3 * rank)).to(dtype)


def run_all(group: Collectives, dtype: torch.dtype) -> None:
    """Run every collective from every root, and check what this rank gets."""
    rank, everyone = group.rank, [values(rank, dtype) for rank in range(group.size)]
    for root in range(group.size):
        tensor = everyone[rank].clone()
        group.broadcast(tensor, root)
        assert torch.equal(tensor, everyone[root])

        tensor = everyone[rank].clone()
        group.sum_to(tensor, root)
        in_order = everyone[0]
        for other in everyone[1:]:
            in_order = in_order + other
        assert torch.equal(tensor, in_order if rank == root else everyone[rank])
    gathered = torch.empty(group.size, 4, 3, dtype=dtype)
    group.gather_all(everyone[rank], gathered)
    assert torch.equal(gathered, torch.stack(everyone))


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def job(rank: int, num_ranks: int, store: str) -> None:
    """Run one process of the job; an assertion that fails in it fails the test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    members = range(num_ranks)
    first, second = (TorchCollectives(members, rank, CPU, TIMEOUT) for _ in range(2))
    for dtype in DTYPES:
        run_all(first, dtype)
    run_all(second, torch.float32)
    if rank != 1:
        some_of_the_ranks([0, 2], rank // 2)
    a_rank_that_leaves_ends_the_wait_of_the_others(first)
    for group in (first, second):
        group.close()
    dist.destroy_process_group()


def some_of_the_ranks(members: Sequence[int], rank: int) -> None:
    group = TorchCollectives(members, rank, CPU, TIMEOUT)
    assert (group.rank, group.size) == (rank, 2)
    run_all(group, torch.float32)


def a_rank_that_leaves_ends_the_wait_of_the_others(group: TorchCollectives) -> None:
    if group.rank == 1:
        group.close()
    else:
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
            group.broadcast(values(group.rank), 1)
        assert time.monotonic() - started < 30
    dist.barrier()


def test_collectives_between_processes(tmp_path: Path):
    """Two groups of the same ranks keep apart, and some ranks of a job make a group without the others."""
    torch.multiprocessing.spawn(job, (3, str(tmp_path / "store")), nprocs=3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_collectives_between_threads(num_ranks: int):
    network = InMemoryNetwork(num_ranks)
    groups = [InMemoryCollectives(network, rank, num_ranks) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        for dtype in DTYPES:
            list(pool.map(partial(run_all, dtype=dtype), groups))
    assert network.undelivered() == []
