"""The costs of a model's units are found again in the profile of a run, whose stages are sums of them."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from megatron.zero_bubble.schedule import Placement, ScheduleError
from megatron.zero_bubble.schedule.formats import Profile, Setting
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.session.layers import to_layout
from megatron.zero_bubble.session.profiled_costs import fit_units, partition_of_profile

DENSE = UnitCosts(3, 4, 2, 100, -40, -60, time_r=3, memory_r=90)
EXPERTS = UnitCosts(5, 9, 1, 300, -40, -260, time_r=5, memory_r=280)
EMBEDDING, OUTPUT = UnitCosts(0.5, 0.25, 0, 10, -10, 0), UnitCosts(6, 7, 8, 500, -100, -400)
SETTINGS: dict[str, Setting] = {
    "seq_length": 4,
    "micro_batch_size": 1,
    "hidden_size": 5,
    "bf16": True,
    "fp16": False,
    "context_parallel_size": 1,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}
LINEAR = Placement("linear", 4)


def model(*layers: UnitCosts) -> ModelCosts:
    return ModelCosts(EMBEDDING, layers, OUTPUT, time_comm=0.5)


def profile(costs: ModelCosts, partition: tuple[int, ...], placement: Placement = LINEAR) -> Profile:
    settings = {"num_layers": sum(partition), "pipeline_model_parallel_layout": to_layout(partition)}
    return Profile(placement, costs.of_stages(partition, placement), 0.1, {**SETTINGS, **settings})


def assert_same(fitted: ModelCosts, expected: ModelCosts) -> None:
    assert fitted.time_comm == expected.time_comm
    ours, theirs = ((each.embedding, *each.layers, each.output) for each in (fitted, expected))
    for unit, known in zip(ours, theirs, strict=True):
        for field in fields(UnitCosts):
            assert getattr(unit, field.name) == pytest.approx(getattr(known, field.name), abs=1e-9), field.name


def test_the_vocabulary_is_found_again_in_a_profile_with_shards():
    """F and B of the output are measured together in S, and B and W of the embedding in EW."""
    partition = (2, 2, 3, 1)
    sharded = model(*[DENSE] * 8).vocabulary_parallel(4).of_stages(partition, LINEAR)
    settings = {"num_layers": 8, "pipeline_model_parallel_layout": to_layout(partition)}
    fitted = fit_units(Profile(LINEAR, sharded, 0.1, {**SETTINGS, **settings}))
    embedding = replace(EMBEDDING, time_b=0, time_w=EMBEDDING.time_b + EMBEDDING.time_w, memory_f=0, memory_b=0)
    half = (OUTPUT.time_f + OUTPUT.time_b) / 2
    output = replace(OUTPUT, time_f=half, time_b=half, memory_b=0, memory_w=-OUTPUT.memory_f)
    assert_same(fitted, ModelCosts(embedding, (DENSE,) * 8, output, time_comm=0.5))


@pytest.mark.parametrize(
    ("partition", "placement"),
    [
        ((2, 2, 2, 2), LINEAR),
        ((3, 2, 2, 1), LINEAR),
        ((0, 4, 4, 0), LINEAR),
        ((2, 2, 2, 2), Placement("v", 2, 2)),
        ((3, 1, 2, 2, 2, 1), Placement("interleaved", 2, 3)),
    ],
    ids=str,
)
def test_units_are_found_again(partition, placement):
    known = model(*[DENSE] * sum(partition))
    assert_same(fit_units(profile(known, partition, placement)), known)


def test_kinds_of_layers_are_told_apart_if_stages_differ_in_them():
    known = model(DENSE, DENSE, EXPERTS, DENSE, EXPERTS, EXPERTS, EXPERTS, DENSE)
    kinds = [0, 0, 1, 0, 1, 1, 1, 0]
    assert_same(fit_units(profile(known, (2, 2, 2, 2)), kinds), known)
    alternating = model(*[DENSE, EXPERTS] * 4)
    fitted = fit_units(profile(alternating, (2, 2, 2, 2)), [0, 1] * 4)
    mean = (DENSE.time_b + EXPERTS.time_b) / 2
    assert [layer.time_b for layer in fitted.layers] == [pytest.approx(mean)] * 8


def test_of_two_stages_the_embedding_is_assumed_to_cost_nothing():
    known = replace(model(*[DENSE] * 4), embedding=UnitCosts(0, 0, 0))
    assert_same(fit_units(profile(known, (2, 2), Placement("linear", 2))), known)


def test_noise_is_spread_and_makes_no_cost_negative():
    measured = profile(model(*[DENSE] * 8), (2, 2, 2, 2))
    # The first stage is measured to be shorter than its layers alone.
    noisy = replace(measured.costs, time_f=(5.0, 5.9, 6.4, 12.0))
    fitted = fit_units(replace(measured, costs=noisy))
    assert fitted.embedding.time_f == 0
    assert fitted.layers[0].time_f == pytest.approx((5.0 + 5.9 + 6.4) / 6)
    assert fitted.output.time_f == pytest.approx(12 - 2 * fitted.layers[0].time_f)


def test_recomputation_that_was_not_measured_is_the_forward_and_all_but_a_layers_input():
    layer = replace(DENSE, time_r=0, memory_r=0)
    fitted = fit_units(profile(model(*[layer] * 8), (2, 2, 2, 2)))
    layer_input = 4 * 1 * 5 * 2 / 2
    assert fitted.layers[0].time_r == pytest.approx(layer.time_f)
    assert fitted.layers[0].memory_r == pytest.approx(layer.memory_f - layer_input)


def test_the_partition_is_that_of_the_profiled_run():
    measured = profile(model(*[DENSE] * 8), (2, 2, 2, 2))
    settings = {**measured.model, "pipeline_model_parallel_layout": None}
    ends = {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1}
    assert partition_of_profile(replace(measured, model=settings)) == (2, 2, 2, 2)
    assert partition_of_profile(replace(measured, model={**settings, **ends})) == (3, 2, 2, 1)
    assert partition_of_profile(
        replace(measured, model={**settings, **ends, "pipeline_model_parallel_layout": "Et|t*3|t*3|tL"})
    ) == (1, 3, 3, 1)


def test_a_profile_that_determines_nothing_is_refused():
    one = profile(model(DENSE, DENSE), (2,), Placement("linear", 1))
    with pytest.raises(ScheduleError, match="a profile of 1 stages does not determine the costs of its layers"):
        fit_units(one)
    with pytest.raises(ScheduleError, match="the number of layers of the profile's stages is unknown: --num-layers 7"):
        fit_units(replace(one, placement=LINEAR, model={**SETTINGS, "num_layers": 7}))


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "pipeline_model_parallel_layout",
            5,
            "the profile's pipeline_model_parallel_layout must be of type str, got 5",
        ),
        ("hybrid_layer_pattern", 5, "the profile's hybrid_layer_pattern must be of type str, got 5"),
        ("num_layers", "8", "the profile's num_layers must be of type int, got '8'"),
        (
            "decoder_first_pipeline_num_layers",
            "2",
            "the profile's decoder_first_pipeline_num_layers must be of type int, got '2'",
        ),
        (
            "pipeline_model_parallel_layout",
            "Et|q",
            "the number of layers of the profile's stages is unknown: --pipeline-model-parallel-layout Et|q: ",
        ),
    ],
)
def test_damaged_settings_are_one_line(name, value, line):
    known = profile(model(*[DENSE] * 8), (2, 2, 2, 2))
    with pytest.raises(ScheduleError, match=rf"^{re.escape(line)}[^\n]*$"):
        partition_of_profile(replace(known, model={**known.model, name: value}))
