"""Stages of a pipeline exchange tuples and dicts of tensors with and without gradients, numbers and None."""

from __future__ import annotations

import math

import pytest
import torch
from rank_threads import gradients_of, merged, pipelines, run_in_one_process
from small_layers import WIDTH, assert_equal, stack
from torch import nn


class Branches(nn.Module):
    """Makes a dict with a tuple, integers, a tensor without a gradient, one that nobody uses, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        tensors = {"order": x.argsort(), "mask": (x > 0).float(), "unused": x * 2}
        return {"pair": (self.left(x), self.right(x)), **tensors, "no": None, "nan": float("nan")}


class Mixed(nn.Module):
    """Hands a part of its input on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts):
        left, right = parts["pair"]
        left = self.inner(left.gather(1, parts["order"])) * parts["mask"]
        return {**parts, "pair": (left, right), "unused": 1.5}


class Joined(nn.Module):
    def forward(self, parts):
        left, right = parts["pair"]
        return left * right.sum(1, keepdim=True) + (0 if parts["no"] is None and math.isnan(parts["nan"]) else 1)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved-zb"])
def test_stages_exchange_tuples_and_dicts(schedule, checkpoint):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Branches(), Mixed(), Mixed(), Joined(), nn.Linear(WIDTH, WIDTH)]
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    model, loss = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform", "checkpoint": checkpoint}
    parts = pipelines(2, layers, nn.functional.mse_loss, train, **arguments)
    assert_equal(merged(parts), gradients_of(model))


class Skipped(nn.Module):
    """Skips its layer for inputs below zero, as LayerDrop does at random."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_first_microbatch_may_skip_all_trained_layers_of_a_stage(checkpoint):
    layers, (x, y) = stack(2)
    layers, batch = [Skipped(), *layers], (torch.cat([-x[:4].abs(), x[4:].abs()]), y)
    model, loss = run_in_one_process(layers, nn.functional.mse_loss, batch, 4)

    def train(pipeline):
        assert torch.equal(pipeline.train_batch(batch), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": [1], "checkpoint": checkpoint}
    assert_equal(merged(pipelines(2, layers, nn.functional.mse_loss, train, **arguments)), gradients_of(model))
