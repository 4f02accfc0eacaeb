"""A pipeline tells which layers each stage has, how long they take, and which of them keep W in B."""

from __future__ import annotations

import logging

import pytest
from rank_threads import gradients_of, pipelines
from small_layers import stack
from torch import nn

from megatron.zero_bubble.planner import generate


def test_what_keeps_its_w_in_b_is_listed_with_its_share_at_start_and_in_the_summary(caplog):
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.ReLU()]
    with caplog.at_level(logging.WARNING, logger="megatron.zero_bubble"):
        (first, second) = pipelines(
            2, layers, nn.functional.mse_loss, lambda pipeline: pipeline.summary(), schedule="zb-h1", partition=[1]
        )
    assert first == second
    notice = "Pipeline: W stays in B for BatchNorm1d (20.0% of the parameters); split_layers=[...] splits more"
    assert caplog.messages == [notice]  # from one rank alone
    assert "stage 1 on rank 1: layers 1 to 3, 3 layers" in first
    assert "W is split off for 80.0% of the parameters" in first
    assert "W stays in B: BatchNorm1d, 20.0% of the parameters" in first


@pytest.mark.parametrize("partition", ["parameters", "type:linear", "profile"])
def test_partitions_give_every_stage_layers(partition):
    layers, batch = stack(4)
    example = batch[0][:2], batch[1][:2]
    arguments = {"schedule": "zb-1p", "num_microbatches": 4, "partition": partition, "example": example}

    def use(pipeline):
        pipeline.train_batch(batch)
        return pipeline.layout

    first, second = pipelines(2, layers, nn.functional.mse_loss, use, **arguments)
    assert first == second
    if partition != "profile":
        assert first.loads[0] == first.loads[1]
    else:
        assert first.unit == "s a microbatch"
        assert all(load > 0 for load in first.loads)


def test_the_time_of_every_stage_is_measured():
    layers, batch = stack(4)
    arguments = {"schedule": "zb-v", "num_microbatches": 4, "partition": "uniform"}
    use = lambda pipeline: (pipeline.stage_times(batch), gradients_of(pipeline))  # noqa: E731
    (first, _), (second, grads) = pipelines(2, layers, nn.functional.mse_loss, use, **arguments)
    assert first == second
    assert len(first) == 4
    assert all(time > 0 for stage in first for time in stage)
    assert all(grad is not None for grad in grads.values())


@pytest.mark.parametrize(("name", "value"), [("memory_limit", 1), ("num_chunks", 2)])
def test_options_of_a_plan_are_refused_with_a_schedule_that_is_already_made(name, value):
    layers, batch = stack(4)
    arguments = {"schedule": generate("zb-2p", 2, 4), "num_microbatches": 4, name: value}
    message = rf"^{name}={value}: schedule zb-2p is already made: give {name} to the function that makes the schedule"
    with pytest.raises(ValueError, match=message):
        pipelines(2, layers, nn.functional.mse_loss, lambda pipeline: pipeline.train_batch(batch), **arguments)
