"""Collectives on copies on the host give what they give on the tensors themselves, as megatron-core calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron.zero_bubble.cli.check.host_collectives import StagedWork, stage_collectives


def mine(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * rank


def all_reduce(rank: int) -> torch.Tensor:
    tensor = mine(rank, 4).to(torch.bfloat16)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def all_reduce_later(rank: int) -> torch.Tensor:
    tensor = mine(rank, 4)
    dist.all_reduce(tensor, async_op=True).wait()
    return tensor


def broadcast(rank: int) -> torch.Tensor:
    tensor = mine(rank, 4)
    dist.broadcast(tensor, src=1)
    return tensor


def gather_in_place(rank: int) -> torch.Tensor:
    """The distributed optimizer's: the input is a part of the output."""
    whole = torch.zeros(6)
    whole[3 * rank : 3 * rank + 3] = mine(rank, 3)
    dist.all_gather_into_tensor(whole, whole[3 * rank : 3 * rank + 3])
    return whole


def scatter_in_place(rank: int) -> torch.Tensor:
    whole = mine(rank, 6)
    part = whole[3 * rank : 3 * rank + 3]
    dist.reduce_scatter_tensor(part, whole)
    return part


def coalesced(rank: int) -> torch.Tensor:
    tensors = [mine(rank, 2), mine(rank, 3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as work:
        for tensor in tensors:
            dist.all_reduce(tensor)
    work.wait()
    return torch.cat(tensors)


def coalesced_scatter(rank: int) -> torch.Tensor:
    wholes = [mine(rank, 4), mine(rank, 6)]
    parts = [torch.zeros(2), torch.zeros(3)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as work:
        for part, whole in zip(parts, wholes, strict=True):
            dist.reduce_scatter_tensor(part, whole)
    work.wait()
    return torch.cat(parts)


def gather_list(rank: int) -> torch.Tensor:
    parts = [torch.zeros(2, 2) for _ in range(2)]
    dist.all_gather(parts, mine(rank, 2, 2).t())
    return torch.stack(parts)


def neighbours(rank: int) -> torch.Tensor:
    """megatron-core's pipeline: both directions at once."""
    received = torch.zeros(3)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine(rank, 3), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    )
    for work in works:
        work.wait()
    return received


def objects(rank: int) -> torch.Tensor:
    found: list[int] = [0, 0]
    dist.all_gather_object(found, rank + 1)
    dist.barrier()
    return torch.tensor(found)


CALLS: tuple[Callable[[int], torch.Tensor], ...] = (
    *(all_reduce, all_reduce_later, broadcast, gather_in_place, scatter_in_place, coalesced, coalesced_scatter),
    *(gather_list, neighbours, objects),
)


def job(rank: int, store: str) -> None:
    """One process of two; an assertion that fails in it fails the test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    expected = [call(rank) for call in CALLS]
    undo = stage_collectives("cpu")
    for call, tensor in zip(CALLS, expected, strict=True):
        assert torch.equal(call(rank), tensor), call.__name__
    a_message_arrives_once_it_is_waited_for(rank)
    undo()
    assert not isinstance(dist.all_reduce(mine(rank, 2), async_op=True), StagedWork)
    dist.barrier()
    dist.destroy_process_group()


def a_message_arrives_once_it_is_waited_for(rank: int) -> None:
    received, sent = torch.full((2,), -1.0), mine(rank, 2)
    receive = dist.irecv(received, 1 - rank)
    send = dist.isend(sent, 1 - rank)
    sent.zero_()  # what was sent is a copy
    send.wait()
    dist.barrier()
    assert received.tolist() == [-1.0, -1.0]
    assert not receive.is_completed()
    receive.wait()
    assert torch.equal(received, mine(1 - rank, 2))


def test_collectives_on_copies_equal_those_on_the_tensors(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(job, (str(tmp_path / "store"),), nprocs=2)


def test_tensors_of_another_device_are_left_alone(monkeypatch) -> None:
    """A tensor on the host goes to gloo as it is, where tensors on the GPU are copied first."""
    calls = []
    monkeypatch.setattr(dist.ProcessGroup, "broadcast", lambda group, *arguments: calls.append(arguments))
    undo = stage_collectives("cuda")
    tensor = torch.ones(1)
    dist.ProcessGroup.broadcast(None, [tensor])
    undo()
    assert calls[0][0][0] is tensor
