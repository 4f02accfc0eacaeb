"""Every schedule gives a pipeline of plain layers the loss and the gradients of one process, bit for bit."""

from __future__ import annotations

import pytest
import torch
from rank_threads import gradients_of, merged, pipelines, run_in_one_process
from torch import nn

from megatron.zero_bubble.pipeline import rank_steps
from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.runtime import offload_store
from megatron.zero_bubble.runtime.offload_store import OffloadStore

SCHEDULES = [name for name in names() if name not in ("optimal", "dualpipe-v")]


def convolutions() -> tuple[list[nn.Module], tuple[torch.Tensor, torch.Tensor]]:
    """Return small layers of AlexNet's kinds, with a batch; cuts fall before layers that work in place."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 12, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.BatchNorm2d(12)]
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(inplace=True), nn.Linear(16, 5)]
    return layers, (torch.randn(12, 3, 16, 16), torch.randint(5, (12,)))


def assert_equal(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        assert torch.equal(ours[name], value), name


def assert_like_one_process(num_ranks: int, **arguments: object) -> None:
    layers, batch = convolutions()
    model, loss = run_in_one_process(layers, nn.functional.cross_entropy, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return {**gradients_of(pipeline), **dict(pipeline.named_buffers())}

    arguments = {"num_microbatches": 4, "partition": "uniform", **arguments}
    parts = pipelines(num_ranks, layers, nn.functional.cross_entropy, train, **arguments)
    assert_equal(merged(parts), {**gradients_of(model), **dict(model.named_buffers())})


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_and_gradients_are_those_of_one_process(schedule, num_ranks):
    assert_like_one_process(num_ranks, schedule=schedule)


@pytest.mark.parametrize(
    "arguments",
    [
        {"schedule": "interleaved-1f1b", "num_chunks": 5},
        {"schedule": "auto", "num_chunks": 2, "memory_limit": 1.5},
        {"schedule": generate("zb-h2", 2, 4)},
        {"schedule": "dualpipe-v"},
    ],
    ids=["five chunks", "memory limit", "given schedule", "two microbatches a rank"],
)
def test_schedules_may_be_chosen_in_detail(arguments):
    assert_like_one_process(2, **arguments)


@pytest.mark.parametrize("schedule", ["auto", "zb-v"])
def test_copies_to_the_host_change_no_bit(schedule, monkeypatch):
    left_by_copies = []

    class Counting(OffloadStore):
        def release(self, chunk, microbatch):
            before = self.device_bytes(chunk, microbatch)
            super().release(chunk, microbatch)
            left_by_copies.append(self.device_bytes(chunk, microbatch) / before)

    monkeypatch.setattr(offload_store, "SMALLEST", 0)
    monkeypatch.setattr(rank_steps, "OffloadStore", Counting)
    assert_like_one_process(2, schedule=schedule, memory_limit=1.25, offload=4.0)
    assert left_by_copies
    assert max(left_by_copies) < 0.9
