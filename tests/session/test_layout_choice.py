"""A layout is chosen where no flag fixes it, among the layouts that the flags and the memory limit allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import Layout
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.layout_choice import (
    check_unit_costs_output,
    choose_layout,
    is_layout_open,
    megatrons_layout_flags,
)
from megatron.zero_bubble.session.layout_words import flags_of_layout
from tests.session.layout_jobs import HEAVY, LAYER, MODEL, OUTPUT, WHOLE, all_of, flags


def test_a_layout_is_open_unless_a_flag_says_it() -> None:
    assert is_layout_open(flags())
    assert is_layout_open(flags(num_virtual_stages_per_pipeline_rank=2))


@pytest.mark.parametrize(
    "given",
    [
        {"zero_bubble": False},
        {"zero_bubble_keep_layout": True},
        {"zero_bubble_schedule": "zb-h1"},
        {"pipeline_model_parallel_layout": "Et*2|t*2|t*2|t*2L"},
        {"decoder_last_pipeline_num_layers": 1},
        {"account_for_loss_in_pipeline_split": True, "num_layers": 7},
    ],
    ids=lambda given: next(iter(given)),
)
def test_flags_that_fix_the_layout(given: dict[str, object]) -> None:
    assert not is_layout_open(flags(**given))


def test_the_output_gets_a_stage_with_fewer_layers_and_megatrons_split_is_beside_it() -> None:
    found = choose_layout(WHOLE, MODEL, None, 1024)
    assert found.plan.layout == Layout(Placement("linear", 4), (2, 3, 3, 0))
    assert [plan.timeline.schedule.name for plan in found.megatrons] == ["auto", "1f1b"]
    assert {plan.layout.partition for plan in found.megatrons} == {(2, 2, 2, 2)}


def test_by_default_no_rank_needs_more_than_the_fullest_of_1f1b_with_megatrons_split() -> None:
    found = choose_layout(flags(), MODEL, None, 1024)
    [_, one_f_one_b] = found.megatrons
    assert all(plan.memory <= one_f_one_b.memory * (1 + 1e-9) for plan in all_of(found))


def test_layouts_are_chosen_for_what_copies_to_the_host_allow() -> None:
    """Within half of 1F1B's memory, copies that take half of F pay off; those that take long change nothing."""
    short = replace(WHOLE, zero_bubble_memory_limit="0.5", global_batch_size=8)
    rates = (None, 1e-3 * LAYER.memory_f, 2 * LAYER.memory_f)
    kept, slow, fast = (choose_layout(short, MODEL, None, 1024, is_quick=True, host_rate=rate).plan for rate in rates)
    assert slow.time <= kept.time
    assert not slow.timeline.schedule.offloads
    assert fast.time < 0.99 * kept.time
    assert fast.timeline.schedule.offloads
    assert fast.layout.recompute is Recompute.NONE


def test_what_flags_fix_is_not_searched() -> None:
    kinds = {
        plan.layout.placement
        for plan in all_of(choose_layout(flags(num_virtual_stages_per_pipeline_rank=2), MODEL, None, 1024))
    }
    assert kinds == {Placement("interleaved", 4, 2)}
    kinds = {
        plan.layout.placement for plan in all_of(choose_layout(flags(zero_bubble_placement="v"), MODEL, None, 1024))
    }
    assert kinds == {Placement("v", 4, 2)}
    full = choose_layout(flags(recompute_granularity="full", zero_bubble_placement="linear"), MODEL, None, 1024)
    assert {plan.layout.recompute for plan in all_of(full)} == {Recompute.FULL}


def test_the_layout_of_megatrons_flags_is_a_candidate_where_all_are_searched() -> None:
    fixed = flags(pipeline_model_parallel_layout="Et*1|t*1|t*1|t*1|t*1|t*1|t*1|t*1L")
    assert megatrons_layout_flags(fixed) == [f"--pipeline-model-parallel-layout {fixed.pipeline_model_parallel_layout}"]
    found = choose_layout(fixed, MODEL, None, 1024, frees_layout=True)
    own = found.megatrons[-1]
    assert own.layout == Layout(Placement("interleaved", 4, 2), (1,) * 8)
    assert own.timeline.schedule.name == "interleaved-1f1b"
    assert found.plan.time <= own.time * (1 + 1e-9)
    assert {plan.layout.placement.kind for plan in all_of(found)} > {"interleaved"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"num_virtual_stages_per_pipeline_rank": 2}, ["--num-virtual-stages-per-pipeline-rank 2"]),
        ({"num_layers_per_virtual_pipeline_stage": 1}, ["--num-layers-per-virtual-pipeline-stage 1"]),
        ({"num_virtual_stages_per_pipeline_rank": 2, "zero_bubble_keep_layout": True}, []),
        ({"num_virtual_stages_per_pipeline_rank": 2, "zero_bubble_schedule": "interleaved-zb"}, []),
        ({"pipeline_model_parallel_layout": "E|t*2|t*2|t*4L", "zero_bubble_placement": "linear"}, []),
    ],
)
def test_flags_that_a_search_can_do_without(given: dict[str, object], named: list[str]) -> None:
    assert megatrons_layout_flags(flags(**given)) == named


def test_under_full_recomputation_1f1b_recomputes_in_its_backward() -> None:
    found = choose_layout(replace(WHOLE, recompute_granularity="full"), MODEL, None, 1024)
    [ours, one_f_one_b] = found.megatrons
    assert ours.timeline.schedule.recomputes
    assert not one_f_one_b.timeline.schedule.recomputes
    last = MODEL.output.time_b + 2 * (LAYER.time_b + LAYER.time_r)
    assert one_f_one_b.timeline.costs.time_b[-1] == pytest.approx(last)


@pytest.mark.parametrize(("limit", "megatrons"), [("0.7", ["auto"]), ("1", ["auto", "1f1b"])])
def test_planned_recomputation_is_compared_with_1f1b_that_keeps_everything(limit: str, megatrons: list[str]) -> None:
    given = {"zero_bubble_recompute": "planned", "zero_bubble_memory_limit": limit}
    found = choose_layout(replace(WHOLE, **given), MODEL, None, 1024)
    assert found.plan.layout.recompute is Recompute.PLANNED
    assert [plan.timeline.schedule.name for plan in found.megatrons] == megatrons
    assert [plan.layout.recompute for plan in found.megatrons] == [Recompute.PLANNED, Recompute.NONE][: len(megatrons)]


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_a_loss_that_averages_over_microbatches_is_not_recomputed(kind: str) -> None:
    short = flags(zero_bubble_memory_limit="3MiB", zero_bubble_vocabulary_parallel="off")
    found = choose_layout(replace(short, given_model={"moe_router_load_balancing_type": kind}), MODEL, None, 1024)
    recomputes = Recompute.PLANNED in {plan.layout.recompute for plan in all_of(found)}
    assert recomputes is (kind == "aux_loss")


def test_what_fsdp_cannot_recompute_is_not_recomputed_where_memory_is_short() -> None:
    short = {"zero_bubble_memory_limit": "3MiB", "zero_bubble_vocabulary_parallel": "off"}
    recomputed = {
        is_sharded: {plan.layout.recompute for plan in all_of(choose_layout(made, MODEL, None, 1024))}
        for is_sharded in (False, True)
        for made in [flags(**short, use_torch_fsdp2=is_sharded)]
    }
    assert recomputed == {False: {Recompute.PLANNED, Recompute.NONE}, True: {Recompute.NONE}}


def test_what_fits_nowhere_is_one_line_that_names_the_flag() -> None:
    with pytest.raises(
        ValueError,
        match=r"^--zero-bubble-memory-limit 1KiB: no layout .* fits: \d+KiB for each rank are enough for activations",
    ):
        choose_layout(flags(zero_bubble_memory_limit="1KiB"), MODEL, None, 1024)


def test_a_heavy_vocabulary_is_spread_unless_a_flag_or_its_size_forbids_it() -> None:
    given = flags(num_layers=16)
    chosen = choose_layout(given, HEAVY, None, 1024).plan
    assert chosen.layout.vocabulary_parallel
    assert flags_of_layout(chosen.layout, given.mtp_num_layers)["zero_bubble_vocabulary_parallel"] == "on"
    for other, vocabulary in (
        ({"zero_bubble_vocabulary_parallel": "off"}, 1024),
        ({}, 1026),
        ({"mtp_num_layers": 1}, 1024),
    ):
        whole = choose_layout(flags(num_layers=16, **other), HEAVY, None, vocabulary).plan
        assert not whole.layout.vocabulary_parallel
        assert flags_of_layout(whole.layout, given.mtp_num_layers)["zero_bubble_vocabulary_parallel"] == "off"
    forced = choose_layout(flags(zero_bubble_vocabulary_parallel="on"), MODEL, None, 1024)
    assert all(plan.layout.vocabulary_parallel for plan in all_of(forced))


def test_megatrons_split_is_not_compared_with_itself() -> None:
    """Nothing is gained on one rank's share of a model whose stages are equal."""
    even = replace(MODEL, output=replace(OUTPUT, time_f=0.01, time_b=0.01, time_w=0.01))
    linear = flags(zero_bubble_placement="linear", zero_bubble_vocabulary_parallel="off", zero_bubble_memory_limit="2")
    found = choose_layout(linear, even, None, 1024)
    assert found.plan.layout.partition == (2, 2, 2, 2)
    assert found.megatrons_time is None
    other = choose_layout(WHOLE, MODEL, None, 1024)
    assert other.megatrons_time is not None
    assert other.megatrons_time.milliseconds == other.megatrons[1].time


def test_the_speed_up_over_megatrons_split_in_a_job_is_that_of_the_choice() -> None:
    """A job simulates the chosen layout without the slowdown by varying durations, which the times of plans include."""
    choice = choose_layout(WHOLE, MODEL, None, 1024)
    plan = replace(choice.plan, slowdown=1.25)
    own = replace(choice, plan=plan).megatrons_time
    assert own is not None
    simulated = plan.request.time_of(plan.timeline)
    assert own.with_costs(plan.timeline.costs) / simulated == pytest.approx(choice.megatrons[1].time / plan.time)


@pytest.mark.parametrize("given", [{"zero_bubble_schedule": "zb-h1"}, {"zero_bubble_keep_layout": True}])
def test_unit_costs_are_written_only_where_a_layout_is_chosen(given: dict[str, object]) -> None:
    check_unit_costs_output(flags(zero_bubble_unit_costs_output="units.json"))
    with pytest.raises(ValueError, match=r"^--zero-bubble-unit-costs-output units.json: .* leave out flags that fix"):
        check_unit_costs_output(flags(zero_bubble_unit_costs_output="units.json", **given))
