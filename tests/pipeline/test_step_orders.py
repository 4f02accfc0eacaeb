"""Microbatches of different shapes run in a planned order, and numbers are those of one process in that order."""

from __future__ import annotations

import time
from random import Random
from unittest import mock

import pytest
import torch
from rank_threads import accumulate_pairs, gradients_of, merged, pipelines
from test_pipeline_numerics import assert_equal
from test_pipeline_shapes import WIDTH, layers
from torch import nn
from torch.nn.functional import mse_loss

from megatron.zero_bubble import PipelineOptions
from megatron.zero_bubble.pipeline.batches import sizes_of
from megatron.zero_bubble.runtime.step_planner import FIRST_STEPS, StepDecision, StepPlanner

COUNT = 9


class Slow(nn.Module):
    """Takes time in proportion to the tokens, forward and backward."""

    def forward(self, x):
        time.sleep(x.numel() * 1e-5)
        if x.requires_grad:
            x.register_hook(lambda grad: time.sleep(grad.numel() * 1e-5))
        return x * 1


def step_of(random: Random) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Microbatches of which the first and the last are long."""
    lengths = [200, *(random.randint(10, 30) for _ in range(COUNT - 2)), 150]
    return [(torch.randn(2, length, WIDTH), torch.randn(2, length, WIDTH)) for length in lengths]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_numbers_are_those_of_the_planned_order(schedule: str):
    random, own = Random(schedule), layers()
    for place in (9, 5, 1):
        own.insert(place, Slow())
    model = nn.Sequential(*own)
    steps = [step_of(random) for _ in range(FIRST_STEPS[1] + 3)]
    decide, orders = StepPlanner.decide, {}

    def decided(self, step, *arguments, **options):
        decision = decide(self, step, *arguments, **options)
        assert orders.setdefault(step, decision.places) == decision.places
        return decision

    def train(pipeline):
        return [
            (pipeline.train_batch(iter(pairs)), {k: v.clone() for k, v in gradients_of(pipeline).items()})
            for pairs in steps
        ]

    with mock.patch.object(StepPlanner, "decide", decided):
        of_ranks = pipelines(3, own, mse_loss, train, num_microbatches=COUNT, schedule=schedule, partition="uniform")
    in_data_order = tuple(range(COUNT))
    measured = FIRST_STEPS[1]
    assert all(orders[step] == in_data_order for step in range(1, measured + 1))
    assert any(orders[step] != in_data_order for step in range(measured + 1, len(steps) + 1)), orders
    for step, pairs in enumerate(steps):
        loss = accumulate_pairs(model, mse_loss, [pairs[number] for number in orders[step + 1]])
        assert all(torch.equal(found[step][0], loss) for found in of_ranks)
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_equal(merged([found[step][1] for found in of_ranks]), expected)


@pytest.mark.parametrize("options", [{"microbatch_order": "data"}, {"memory_limit": 1.5, "offload": 0.5}])
def test_the_order_of_the_data_is_kept_where_the_options_say_so(options):
    """With `offload`, also if the plan has no copies to the host."""
    steps = [step_of(Random(0)) for _ in range(FIRST_STEPS[1] + 2)]

    def train(pipeline):
        assert not pipeline.schedule.offloads
        for pairs in steps:
            pipeline.train_batch(iter(pairs))

    arguments = {"num_microbatches": COUNT, "schedule": "auto", "partition": "uniform"}
    with mock.patch.object(StepPlanner, "decide") as decide:
        pipelines(2, layers(), mse_loss, train, **arguments, **options)
    decide.assert_not_called()


def test_a_failure_names_the_microbatch_of_the_data():
    model = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    pairs = [(torch.randn(2, length, WIDTH), torch.randn(2, length, WIDTH)) for length in (3, 4, 5)]
    pairs[2] = torch.randn(2, 5, WIDTH + 1), pairs[2][1]

    def train(pipeline):
        with pytest.raises(ValueError, match=r"^microbatch 2: layer 0"):
            pipeline.train_batch(iter(pairs))

    with mock.patch.object(StepPlanner, "decide", return_value=StepDecision(None, (1, 2, 0))):
        pipelines(2, model, mse_loss, train, num_microbatches=3, partition="uniform", schedule="1f1b")


def test_sizes():
    padded = torch.zeros(2, 5, dtype=torch.long)
    assert sizes_of([padded, torch.zeros(7), torch.zeros(2, 3, 4), (torch.zeros(1), torch.zeros(4, 2))]) == [
        (10, 50),
        (7, 49),
        (24, 288),
        (8, 16),
    ]
    assert sizes_of([{"x": padded, "cu_seqlens": torch.tensor([0, 4, 9])}]) == [(9, 41)]


def test_another_order_is_one_line():
    with pytest.raises(ValueError, match=r"^microbatch_order='sorted' is neither 'planned' nor 'data'$"):
        PipelineOptions(microbatch_order="sorted")
