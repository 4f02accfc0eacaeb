"""Pipelines with the same connections between ranks do not close each other's channels."""

from __future__ import annotations

import gc
import re
import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble import Pipeline
from megatron.zero_bubble.pipeline.interconnect import Agreement, connect_ranks, refuse_shared_gpu
from tests.ranks import run_on_ranks
from tests.trainings import process_group

BATCH = torch.ones(8, 4), torch.zeros(8, 4)


def share(rank: int, num_ranks: int, port: int) -> None:
    """Train three pipelines over one `Interconnect`; an error fails the test."""
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)):
        interconnect = connect_ranks()

        def make() -> Pipeline:
            layers = [nn.Linear(4, 4) for _ in range(2)]
            return Pipeline(layers, mse_loss, schedule="zb-h1", num_microbatches=4, interconnect=interconnect)

        closed, freed = make(), make()
        closed.train_batch(BATCH)
        freed.train_batch(BATCH)
        closed.close()
        freed.train_batch(BATCH)
        last = make()
        del freed
        gc.collect()
        last.train_batch(BATCH)
        last.close()
        with pytest.raises(
            ValueError, match=r"^group and interconnect are both given: give the group to connect_ranks"
        ):
            Pipeline([nn.Linear(4, 4)] * 2, mse_loss, group=dist.group.WORLD, interconnect=interconnect)


def test_a_pipeline_closes_only_its_own_connections():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, share, (store.port,), timeout=60) == 0


@pytest.mark.parametrize(
    ("backends", "has_gpu", "device"),
    [
        ("cuda:nccl", True, "cuda:0"),
        ("cpu:gloo,cuda:nccl", True, "cuda:0"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
    ],
)
def test_the_default_device_is_a_gpu_if_the_group_uses_nccl_for_gpus(monkeypatch, backends, has_gpu, device):
    """Without a backend, `init_process_group` chooses one for each type of device, and `get_backend` names none."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert connect_ranks().device == torch.device(device)
        assert connect_ranks(device="cuda").device == torch.device("cuda:0")
    finally:
        dist.destroy_process_group()


def test_a_rank_outside_of_the_group_is_told_so_and_torchs_default_device_does_not_matter():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"^this rank is not a member of the group of the pipeline"):
            connect_ranks(dist.GroupMember.NON_GROUP_MEMBER)
        agreement = Agreement(connect_ranks())
        with torch.device("meta"):
            assert agreement.gather("value") == ["value"]
    finally:
        dist.destroy_process_group()


class OfRanks:
    """Gathers the values of two ranks, of which this is the first."""

    def __init__(self, other: object) -> None:
        self.other = other

    def gather(self, value: object) -> list[object]:
        return [value, self.other]


@pytest.mark.parametrize(("other", "is_shared"), [("GPU-1", True), ("GPU-2", False)])
def test_ranks_that_share_one_of_several_gpus_are_told_to_set_the_device(monkeypatch, other, is_shared):
    """After `init_process_group`, the current GPU of every rank is the first one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    agreement = OfRanks((socket.gethostname(), other))
    line = re.escape('ranks 0 and 1 both use the GPU cuda:0: call torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
    with pytest.raises(ValueError, match=line) if is_shared else nullcontext():
        refuse_shared_gpu(agreement, torch.device("cuda", 0))
    refuse_shared_gpu(OfRanks(None), torch.device("cpu"))
