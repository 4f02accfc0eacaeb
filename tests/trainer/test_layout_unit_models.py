"""Costs of a model's units are measured before the model is built, and measuring leaves nothing behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron.zero_bubble.cli.check.models import Model
from megatron.zero_bubble.cli.check.stage_run import MiddleStage
from megatron.zero_bubble.cli.trainings import complete_arguments, one_process
from megatron.zero_bubble.runtime.cold_caches import ColdCaches
from megatron.zero_bubble.schedule import OpKind, Placement
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.model_states import Parameters, ReplicaCounts, States
from megatron.zero_bubble.session.running import costs_of_units
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.forward_step import make_forward_step
from megatron.zero_bubble.trainer.layout import unit_models
from megatron.zero_bubble.trainer.model import layer_kinds

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU, for which megatron-core is adapted")

MODEL = Model(
    "units",
    layers_a_stage=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    micro_batch_size=2,
    pipeline_size=4,
    vocab_size=120,
)


def measure(args: Arguments, seconds: float = 0, profile: Profile | None = None) -> ModelCosts:
    models = unit_models(args)
    return costs_of_units(JobFlags.of(args), models, layer_kinds(args), profile, seconds)


@pytest.fixture(scope="module")
def args() -> Arguments:
    return MODEL.arguments(num_stages=4)


@pytest.fixture(scope="module", autouse=True)
def process(args: Arguments) -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"), one_process(args):
        yield


def test_layers_of_a_stage_keep_what_they_were_measured_to_keep(args):
    costs = measure(args)
    memory = MiddleStage(MODEL, torch.device("cpu")).profile(rounds=0).memory
    assert len(costs.layers) == 8
    layer = costs.layers[0]
    assert memory == {OpKind.F: 2 * layer.memory_f, OpKind.B: 2 * layer.memory_b, OpKind.W: 2 * layer.memory_w}
    assert layer.memory_f + layer.memory_b + layer.memory_w == 0
    for unit in (costs.embedding, layer, costs.output):
        assert min(unit.time_f, unit.time_b) > 0
    bfloat16 = 2
    layer_input = args.seq_length * args.micro_batch_size * args.hidden_size * bfloat16
    assert (layer.time_r, layer.memory_r) == (layer.time_f, layer.memory_f - layer_input)
    assert costs.embedding.memory_w == 0, "an embedding's gradient is not deferred"
    assert costs.output.memory_w < 0, "the output layer's is"


def test_states_are_those_of_the_built_stages(args):
    costs, states = measure(args), States.of(args, zero_stage=0)
    h, vocabulary = 32, args.padded_vocab_size * 32
    layer = 12 * h**2 + 13 * h
    for unit, dense in (
        (costs.embedding, vocabulary + 16 * h),
        (costs.layers[0], layer),
        (costs.output, vocabulary + 2 * h),
    ):
        assert unit.state == states.of_rank(Parameters(dense, 0), ReplicaCounts(1, 1))


def test_costs_from_a_profile_have_the_states_of_the_units(args):
    costs, placement = measure(args), Placement("linear", 4)
    measured = Profile(placement, costs.of_stages((2, 2, 2, 2), placement), 0.1, {**JobFlags.of(args).model})
    fitted = measure(args, profile=measured)
    assert fitted.states((1, 3, 3, 1), placement) == costs.states((1, 3, 3, 1), placement)
    assert fitted.layers[0].time_f == pytest.approx(costs.layers[0].time_f)


def test_units_are_timed_in_turn_at_least_once_and_more_often_within_the_time(args, monkeypatch):
    calls: list[int] = []

    def counted_forward_step(*given: Any, **options: Any) -> Any:
        forward_step = make_forward_step(*given, **options)

        def counted(data_iterator: Any, model: Any) -> Any:
            calls.append(id(model))
            return forward_step(data_iterator, model)

        return counted

    monkeypatch.setattr("megatron.zero_bubble.trainer.layout.make_forward_step", counted_forward_step)
    measure(args, seconds=0)
    units = calls[:3]
    assert calls[:6] == units * 2, "the first two rounds measure the time between operations"
    assert calls[6:] == [unit for unit in units for _ in range(3)], "then its operations, and both kinds of backwards"
    calls.clear()
    measure(args, seconds=60)
    assert len(calls) == 6 + 15 * 9
    assert calls[6:] == calls[6:15] * 15, "a device that is slower for a while is so for all units"


def test_every_timed_operation_finds_cold_caches(args, monkeypatch):
    evictions: list[int] = []

    def evict(_: ColdCaches) -> None:
        evictions.append(1)
        time.sleep(0.03)

    monkeypatch.setattr(ColdCaches, "evict", evict)
    costs = measure(args)
    assert len(evictions) == 3 * (1 + 3 + 2 * 2), "around F, B and W; to compare backwards, before them and before F"
    assert costs.time_between < 30, "the time of an eviction is no part of the time between operations"
    assert costs.layers[0].time_w < 30


def test_layers_of_different_kinds_are_measured_once_each():
    flags = ["--num-experts", "2", "--disable-bias-linear", "--moe-layer-freq", "[0]*2+[1]*2", "--num-layers", "4"]
    sizes = ["--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--micro-batch-size", "1"]
    training = ["--lr", "1e-3", "--train-iters", "1", "--mock-data", "--vocab-size", "120"]
    costs = measure(complete_arguments([*sizes, *training, *flags], 1, "test", has_cuda=False))
    dense, other, expert, last = costs.layers
    assert dense == other
    assert expert == last
    assert expert.state > dense.state


def num_models() -> int:
    gc.collect()
    return sum(issubclass(type(thing), GPTModel) for thing in gc.get_objects())


def test_measuring_leaves_no_trace(args):
    flags = ["--num-experts", "2", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear", "--mtp-num-layers", "1"]
    sizes = ["--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]
    training = ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "1", "--mock-data", "--vocab-size", "120"]
    given = complete_arguments([*sizes, *training, *flags], 1, "test", has_cuda=False)
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    random_state, models = torch.get_rng_state(), num_models()
    costs = measure(given)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert num_models() <= models
    assert not get_moe_layer_wise_logging_tracker()
    assert not MTPLossLoggingHelper.tracker
    assert parallel_state._MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE is None
    # Multi-token prediction has a layer, and with it a table for the tokens, after the layers.
    assert costs.output.state > costs.layers[0].state + costs.embedding.state
    without = measure(replace(given, num_experts=None))
    assert without.layers[0].state < costs.layers[0].state
