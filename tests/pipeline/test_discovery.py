"""All ranks agree about the form of a step before it runs."""

from __future__ import annotations

import pytest
import torch
from rank_threads import errors_on_ranks, pipeline_of
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble import TiedLayerSpec

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
