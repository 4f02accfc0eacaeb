"""What two processes do with pipelines of plain layers; `test_pipeline_ranks.py` starts it. Takes a folder."""

from __future__ import annotations

import contextlib
import copy
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from rank_threads import accumulate, accumulate_pairs
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from megatron.zero_bubble import LayerSpec, Pipeline, PipelineOptions

LAYERS = [layer for _ in range(4) for layer in (LayerSpec(nn.Linear, 6, 6), LayerSpec(nn.BatchNorm1d, 6), torch.tanh)]
UNIFORM = PipelineOptions(partition="uniform")


class Marked(nn.Linear):
    """Has a transposed weight, and buffers with the number of the rank in types that gloo does not send."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.weight = nn.Parameter(self.weight.t())
        rank = torch.full((2, 3), float(dist.get_rank()))
        for name, value in {"int16": rank.short(), "float8": rank.to(torch.float8_e4m3fn)}.items():
            self.register_buffer(name, value)
        self.register_buffer("expanded", rank[:1, 0].expand(3), persistent=False)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Names the optimizer's state by parameter, so that every rank's is in one namespace."""


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def adam(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def assert_equal(ours, reference) -> None:
    assert list(ours) == list(reference)
    for name, value in reference.items():
        assert torch.equal(ours[name], value), name


def refuse_replicas(rank: int, replicated: dict[str, dist.ProcessGroup]) -> None:
    """Give the ranks of two stages as replicas, then replicas with different layers or with layers of replicas."""
    wrapped = nn.Sequential(DistributedDataParallel(nn.Linear(6, 6)))
    for layers, groups in (
        (LAYERS, {"replicas": dist.group.WORLD}),
        ([nn.Linear(6, 6 + rank)], replicated),
        ([wrapped], replicated),
        ([LayerSpec(lambda: DistributedDataParallel(nn.Linear(6, 6)))], {**replicated, "options": UNIFORM}),
    ):
        try:
            Pipeline(layers, mse_loss, "zb-h1", 4, **groups)
        except ValueError as error:
            print(f"rank {rank}: {error}\n", end="", flush=True)


class Limited(nn.Linear):
    def forward(self, x):
        if x.max() > 100:
            raise RuntimeError("too large")
        return super().forward(x)


def fail_in_one_replica(rank: int, replicated: dict[str, dist.ProcessGroup], *, is_late: bool) -> None:
    """Train until the second step fails on rank 1; without post-validation, train on."""
    replica = Pipeline([Limited(6, 6)], mse_loss, "zb-h1", 4, PipelineOptions(post_validation=is_late), **replicated)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    inputs, targets = batch(rank)
    try:
        for factor in (1, 1000 if rank == 1 else 1, 1):
            replica.train_step((factor * inputs, targets), optimizer)
    except ValueError as error:
        print(f"rank {rank}: {error}\n", end="", flush=True)
    if not is_late:
        optimizer.zero_grad()
        replica.train_batch((inputs, targets))
        averages = [torch.empty(6, 6) for _ in range(2)]
        dist.all_gather(averages, replica.own_parameters()[0].grad)
        assert torch.equal(*averages), "the averages are of different steps"
    replica.close()


def train_sharded(group: dist.ProcessGroup, *, is_late: bool) -> None:
    """Train a layer whose weights are sharded over the two ranks, on the same data on both ranks.

    Args:
        is_late: whether the layer is sharded after the pipeline is built, as for layers that the pipeline builds.
    """
    torch.manual_seed(1)
    whole = nn.Linear(6, 6)
    sharded = copy.deepcopy(whole)
    if not is_late:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    pipeline = Pipeline([sharded], mse_loss, "zb-h1", 4, group=group)
    if is_late:
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    assert torch.allclose(pipeline.train_batch(batch(0)), accumulate(whole, mse_loss, batch(0), 4))
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    assert torch.allclose(pipeline.clip_grad_norm_(0.1), norm)
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad)
    assert_equal(pipeline.full_state_dict(), {f"0.{name}": value for name, value in whole.state_dict().items()})
    pipeline.close()


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    pipeline = Pipeline(LAYERS, mse_loss, schedule="zb-v", num_microbatches=4)
    optimizer = adam(pipeline)
    model = nn.Sequential(*(nn.Tanh() if layer is torch.tanh else layer.build() for layer in LAYERS))
    model.load_state_dict(pipeline.full_state_dict())
    reference = adam(model)
    for step in range(3):
        loss = pipeline.train_batch(batch(step) if rank == 0 else None)  # in a V one rank has both ends
        assert torch.equal(loss, accumulate(model, mse_loss, batch(step), 4))
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    assert_equal(pipeline.full_state_dict(), model.state_dict())
    pairs = [(x[:size], y[:size]) for size, (x, y) in zip((2, 8, 3, 2), map(batch, range(4)), strict=True)]
    loss = pipeline.train_batch(iter(pairs))
    assert torch.equal(loss, accumulate_pairs(model, mse_loss, pairs)), "shapes that change with every microbatch"
    for one in (optimizer, reference):
        one.step()
        one.zero_grad()
    assert_equal(pipeline.full_state_dict(), model.state_dict())
    state = {"model": pipeline.state_dict(), "optimizer": get_optimizer_state_dict(pipeline, optimizer, options=FLAT)}
    checkpoint.save(state, checkpoint_id=folder)
    pipeline.close()

    groups = [dist.new_group([0]), dist.new_group([1])]
    replicated = {"group": groups[rank], "replicas": dist.group.WORLD}
    marked = Pipeline([Marked()], mse_loss, "zb-h1", num_microbatches=4, **replicated)
    assert all(torch.all(buffer.float() == 0) for buffer in marked.buffers())
    weights = [torch.empty(6, 6) for _ in range(2)]
    dist.all_gather(weights, marked.own_parameters()[0].detach().contiguous())
    assert torch.equal(*weights)
    marked.close()

    refuse_replicas(rank, replicated)
    for is_late in (False, True):
        fail_in_one_replica(rank, replicated, is_late=is_late)
        train_sharded(groups[rank], is_late=is_late)

    # On another number of ranks: each is a pipeline of its own, and a replica of the other.
    replica = Pipeline(LAYERS, mse_loss, schedule="zb-h1", num_microbatches=4, **replicated)
    optimizer = adam(replica, lr=0.5)
    state = {"model": replica.state_dict(), "optimizer": get_optimizer_state_dict(replica, optimizer, options=FLAT)}
    checkpoint.load(state, checkpoint_id=folder)
    replica.load_state_dict(state["model"])
    set_optimizer_state_dict(replica, optimizer, state["optimizer"], options=FLAT)
    assert_equal(replica.state_dict(), model.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02

    distributed = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    copied = adam(distributed)
    copied.load_state_dict(reference.state_dict())
    for step in range(2):
        data = batch(10 + 2 * step + rank)
        replica.train_batch(data)
        pairs = list(zip(*(part.chunk(4) for part in data), strict=True))
        for k, (x, y) in enumerate(pairs):
            with distributed.no_sync() if k + 1 < len(pairs) else contextlib.nullcontext():
                (mse_loss(distributed(x), y) / 4).backward()
        for one in (optimizer, copied):
            one.step()
            one.zero_grad()
    assert_equal(replica.state_dict(), distributed.module.state_dict())

    last = Pipeline(LAYERS, mse_loss, schedule="1f1b", num_microbatches=3)
    for data in (batch(0), iter([batch(0), batch(1), (torch.ones(2, 7), torch.ones(2, 6))])):
        try:
            last.train_batch(data)
        except ValueError as error:
            print(f"rank {rank}: {error}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
