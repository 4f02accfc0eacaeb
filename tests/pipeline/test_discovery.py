"""All ranks agree about the form of a step before it runs."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from rank_threads import errors_on_ranks, gradients_of, merged, pipeline_of, pipelines, run_in_one_process
from small_layers import assert_equal
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble import TiedLayerSpec
from megatron.zero_bubble.pipeline import layer_stage

BATCH = torch.ones(8, 4), torch.zeros(8, 4)


@pytest.mark.parametrize("frozen", [("0.weight",), ("0.weight", "0.bias")])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_tied_layer_that_is_frozen_in_one_place_only_is_refused(frozen, schedule):
    """Under zb-v, both copies are on one rank."""
    ends = [TiedLayerSpec("ends", nn.Linear, 4, 4) for _ in range(2)]
    layers = [ends[0], *(nn.Linear(4, 4) for _ in range(2)), ends[1]]

    def train(interconnect):
        arguments = {"schedule": schedule, "num_microbatches": 4, "partition": "uniform"}
        pipeline = pipeline_of(layers, mse_loss, interconnect, **arguments)
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(name not in frozen)
        pipeline.eval_batch(BATCH)
        with pytest.raises(ValueError, match="TiedLayerSpec"):
            pipeline.train_batch(BATCH)
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(name.replace("3.", "0.") not in frozen)
        pipeline.train_batch(BATCH)
        pipeline.requires_grad_(interconnect.rank == 0)
        pipeline.train_batch(BATCH)

    message = "TiedLayerSpec('ends'): requires_grad differs between copies of the layer: set it on all ranks alike"
    expected = [message] * 2 if schedule == "zb-h1" else ["None"] * 2
    assert [str(error) for error in errors_on_ranks(2, train)] == expected


class Counted(nn.Linear):
    """Counts its backwards."""

    backwards: ClassVar[list[torch.Size]] = []

    def forward(self, x):
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.backwards.append(gradient.shape))
        return output


@pytest.mark.parametrize("has_hooks", [False, True])
def test_the_backward_before_the_first_step_leaves_no_trace(monkeypatch, has_hooks):
    """As on GPUs; a hook, which may take the optimizer's step, runs in steps only."""
    monkeypatch.setattr(layer_stage, "is_needed", lambda device: torch.is_grad_enabled())
    layers = [nn.Linear(4, 4), Counted(4, 4), nn.BatchNorm1d(4), Counted(4, 4)]
    model, loss = run_in_one_process(layers, mse_loss, BATCH, 4)
    Counted.backwards.clear()

    def train(pipeline):
        for parameter in pipeline.own_parameters():
            parameter.grad = torch.zeros_like(parameter)
            if has_hooks:
                parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        assert torch.equal(pipeline.train_batch(BATCH), loss)
        return gradients_of(pipeline)

    arguments = {"schedule": "zb-h1", "num_microbatches": 4, "partition": "uniform"}
    assert_equal(merged(pipelines(2, layers, mse_loss, train, **arguments)), gradients_of(model))
    assert len(Counted.backwards) == 2 * (4 if has_hooks else 5)
