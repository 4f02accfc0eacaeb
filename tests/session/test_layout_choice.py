"""What a job's flags leave open of its layout, and what is chosen."""

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import Layout, Plan
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import chunks_of_flags
from megatron.zero_bubble.session.layout_choice import (
    LayoutChoice,
    check_unit_costs_output,
    choose_layout,
    is_layout_open,
    megatrons_layout_flags,
    saved_choice,
)
from megatron.zero_bubble.session.layout_words import flags_of_layout, layers_words
from megatron.zero_bubble.session.reports import layout_lines
from megatron.zero_bubble.session.settings import job_settings

MIB = 2.0**20
LAYER = UnitCosts(1, 1, 0.8, memory_f=MIB, memory_b=-0.5 * MIB, memory_w=-0.5 * MIB, time_r=1, memory_r=0.9 * MIB)
OUTPUT = UnitCosts(3, 3, 3, memory_f=0.5 * MIB, memory_b=-0.2 * MIB, memory_w=-0.3 * MIB, state=4 * MIB)
MODEL = ModelCosts(UnitCosts(0.01, 0, 0.01, state=4 * MIB), (LAYER,) * 8, OUTPUT, 0.05)


def flags(**given: object) -> JobFlags:
    known = {"pipeline_model_parallel_size": 4, "num_layers": 8, "global_batch_size": 16, "world_size": 4}
    made = JobFlags(**{"zero_bubble": True, **known, **given})
    return JobFlags(**{**vars(made), "model_chunks": chunks_of_flags(made)})


def all_of(found: LayoutChoice) -> list[Plan]:
    """The chosen plan and the others."""
    return [found.plan, *found.plan.others]


WHOLE = flags(zero_bubble_placement="linear", zero_bubble_vocabulary_parallel="off")
"""One chunk a rank, with a whole embedding and output layer."""


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
        match=r"^--zero-bubble-memory-limit 1KiB: no layout .* fits: \d+ bytes of a rank are enough for activations",
    ):
        choose_layout(flags(zero_bubble_memory_limit="1KiB"), MODEL, None, 1024)


def test_the_chosen_layout_as_flags_makes_the_same_layout_again() -> None:
    layout = Layout(Placement("v", 4, 2), (0, 1, 1, 2, 1, 1, 2, 0))
    chosen = flags_of_layout(layout)
    again = flags(**chosen)
    assert again.model_chunks == 2
    assert again.zero_bubble_placement == "v"
    assert chosen["pipeline_model_parallel_layout"] == "E|t*1|t*1|t*2|t*1|t*1|t*2|L"


def saved(**changed: object) -> Namespace:
    """The arguments in the checkpoint of a job whose layout was chosen."""
    chosen = flags_of_layout(Layout(Placement("v", 4, 2), (0, 1, 1, 2, 1, 1, 2, 0)))
    return Namespace(**{**vars(flags()), **chosen, **changed})


def test_a_job_that_goes_on_keeps_the_layout_and_the_seeds_that_were_saved() -> None:
    for by_layer in (True, False):
        choice = saved_choice(saved(zero_bubble_seed_by_layer=by_layer), flags())
        assert choice is not None
        again = flags(**choice.flags)
        assert again.model_chunks == 2
        assert again.zero_bubble_placement == "v"
        assert again.zero_bubble_seed_by_layer is by_layer


LIMITS = {"zero_bubble_layout_limits": (100.0, 200.0, 200.0, 100.0)}
"""The memory limits under which the saved layout was chosen. Its own 1F1B may need another amount of memory."""


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ({}, True),
        ({"zero_bubble_memory_limit": "2"}, False),
        ({"micro_batch_size": 4}, False),
        ({"world_size": 16}, False),
    ],
)
def test_a_job_that_goes_on_keeps_the_memory_limits_of_the_layout(given: dict[str, object], is_kept: bool) -> None:
    now = JobFlags.of(Namespace(**vars(flags(**given))))
    choice = saved_choice(saved(**LIMITS), now)
    assert choice is not None
    planning = job_settings(now, {}, has_cuda=False, choice=choice).planning
    assert planning is not None
    assert planning.limits == (LIMITS["zero_bubble_layout_limits"] if is_kept else None)


@pytest.mark.parametrize(
    ("layout", "is_megatrons"),
    [
        (Layout(Placement("linear", 4), (2, 2, 2, 2)), True),
        (Layout(Placement("linear", 4), (2, 2, 2, 2), vocabulary_parallel=True), False),
        (Layout(Placement("linear", 4), (1, 3, 2, 2)), False),
        (Layout(Placement("v", 4, 2), (1,) * 8), False),
    ],
)
def test_a_job_that_goes_on_with_megatrons_split_compares_the_planned_order_with_megatrons_order(
    layout: Layout, is_megatrons: bool
) -> None:
    choice = saved_choice(Namespace(**{**vars(flags()), **flags_of_layout(layout)}), flags())
    assert choice is not None
    assert choice.is_megatrons_split is is_megatrons
    planning = job_settings(flags(), {}, has_cuda=False, choice=choice).planning
    assert planning is not None
    assert planning.tries_own_order is is_megatrons


def test_a_job_with_the_same_number_of_chunks_keeps_the_layout() -> None:
    choice = saved_choice(saved(zero_bubble_placement="interleaved"), flags(num_virtual_stages_per_pipeline_rank=2))
    assert choice is not None
    assert choice.flags["num_virtual_stages_per_pipeline_rank"] is None


@pytest.mark.parametrize(
    ("changed", "given"),
    [
        ({"num_layers": 9}, {}),
        ({"pipeline_model_parallel_size": 2}, {}),
        ({"zero_bubble_placement": None}, {}),
        ({}, {"zero_bubble_placement": "linear"}),
        ({}, {"zero_bubble_recompute": "planned"}),
        ({}, {"recompute_granularity": "full"}),
        ({"recompute_granularity": "full"}, {}),
        ({}, {"num_virtual_stages_per_pipeline_rank": 2}),
        ({}, {"num_layers_per_virtual_pipeline_stage": 1}),
        ({"zero_bubble_seed_by_layer": False}, {"zero_bubble_seed_by_layer": True}),
        ({"zero_bubble_recompute": "planned"}, {"use_torch_fsdp2": True}),
        ({"zero_bubble_vocabulary_parallel": "on"}, {"use_torch_fsdp2": True}),
    ],
)
def test_a_saved_layout_is_not_kept_by_another_job(changed: dict[str, object], given: dict[str, object]) -> None:
    assert saved_choice(saved(), flags()) is not None
    assert saved_choice(saved(**changed), flags(**given)) is None


def test_the_table_says_what_was_gained_and_which_flags_repeat_it() -> None:
    found = choose_layout(WHOLE, MODEL, None, 1024)
    lines = list(layout_lines(found, flags_of_layout(found.plan.layout)))
    assert lines[0] == " > layout chosen for 4 ranks and 16 microbatches"
    assert "8 layers 1.00 + 1.00 + 0.80 each; embedding 0.01 + 0.00 + 0.01; output 3.00 + 3.00 + 3.00" in lines[1]
    assert lines[3].split()[:5] == ["chosen:", "linear", "2", "3x2", "0"]
    assert lines[4].startswith("     Megatron's split, auto  2x4 ")
    assert lines[-1].endswith(
        "--pipeline-model-parallel-layout 'Et*2|t*3|t*3|L' --zero-bubble-placement linear "
        "--zero-bubble-seed-by-layer --zero-bubble-vocabulary-parallel off"
    )
    times = found.megatrons[0].time / found.plan.time
    assert lines[-2].startswith(f"     as fast as, with Megatron's split: {times:.3f} times auto, ")


def test_a_hybrid_layout_is_shown_and_repeated_by_its_symbols() -> None:
    pattern = HybridPattern.parse("-M*M-M*M")
    found = choose_layout(WHOLE, MODEL, None, 1024)
    lines = list(layout_lines(found, flags_of_layout(found.plan.layout, pattern=pattern)))
    assert "2 layers -: 1.00 + 1.00 + 0.80 each; 4 layers M: 1.00 + 1.00 + 0.80 each; 2 layers *: 1.00" in lines[1]
    assert lines[3].startswith("     chosen: linear          -M | *M- | M*M |   ")
    assert lines[4].startswith("     Megatron's split, auto  -M | *M | -M | *M  ")
    assert "--hybrid-layer-pattern='-M|*M-|M*M|'" in lines[-1]


def test_equal_stages_are_counted() -> None:
    assert layers_words(Layout(Placement("linear", 5), (4, 5, 5, 5, 2))) == "4 5x3 2"


HEAVY = replace(MODEL, output=replace(OUTPUT, time_f=6, time_b=6, time_w=6), layers=(LAYER,) * 16)


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


def test_the_table_says_where_the_vocabulary_is_spread() -> None:
    found = choose_layout(flags(num_layers=16), HEAVY, None, 1024)
    lines = list(layout_lines(found, flags_of_layout(found.plan.layout)))
    assert ", vocabulary shards" in lines[3]
    assert "--zero-bubble-vocabulary-parallel on" in lines[-1]


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


@pytest.mark.parametrize("given", [{"zero_bubble_schedule": "zb-h1"}, {"zero_bubble_keep_layout": True}])
def test_unit_costs_are_written_only_where_a_layout_is_chosen(given: dict[str, object]) -> None:
    check_unit_costs_output(flags(zero_bubble_unit_costs_output="units.json"))
    with pytest.raises(ValueError, match=r"^--zero-bubble-unit-costs-output units.json: .* leave out flags that fix"):
        check_unit_costs_output(flags(zero_bubble_unit_costs_output="units.json", **given))
