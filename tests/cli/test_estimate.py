"""The estimate has a row for each schedule: its time, what it needs, whether that fits, and why it may not run."""

from __future__ import annotations

import json

import pytest
from estimated_jobs import EIGHT, FOUR, FULLY, LARGE, POST_VALIDATION, SMALL, UNTIED, arguments, job

from megatron.zero_bubble.cli.estimate.schedule_estimate import estimate
from megatron.zero_bubble.cli.estimate_command import main
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts, simulate
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.session.job_flags import JobFlags
from tests.mistakes import one_line_mistake

OFFLOADED = ["--zero-bubble-schedule", "auto", "--zero-bubble-memory-limit", "0.5", "--zero-bubble-offload", "auto"]
OFFLOADED += ["--transformer-impl", "local", "--pipeline-model-parallel-size", "4"]


def test_what_does_not_fit_is_said_so_and_auto_takes_what_is_left(capsys):
    flags = [*SMALL, "--num-layers", "4", "--global-batch-size", "32"]
    whole = estimate(job(*flags, tool=["--world-size", "2"]), "zb-2p")
    room = str(int(max(whole.total_bytes) - 1))
    assert main(["--world-size", "2", "--device-memory", f"{room}B", "--json", "--", *flags]) == 0
    by_name = {one["schedule"]: one for one in json.loads(capsys.readouterr().out)["schedules"]}
    assert whole.fits
    assert not by_name["zb-2p"]["fits"]
    assert by_name["1f1b"]["fits"]
    assert by_name["auto"]["fits"]
    assert by_name["1f1b"]["ratio_to_1f1b"] == 1
    assert {"interleaved-zb", "zb-v", "v-min"} <= set(by_name)


def test_the_reduction_of_gradients_takes_time_unless_it_overlaps():
    plain, *overlapping = (
        estimate(job(*LARGE, UNTIED, *more), "zb-h1") for more in ((), ["--overlap-grad-reduce"], ["--use-torch-fsdp2"])
    )
    assert plain.iteration_ms > plain.timeline.makespan
    for each in overlapping:
        assert each.iteration_ms == each.timeline.makespan


def test_post_validation_pays_for_spans_instead_of_the_makespan():
    waiting, going_on = (estimate(job(*LARGE, UNTIED, *more, tool=FOUR), "zb-h2") for more in ((), POST_VALIDATION))
    assert waiting.iteration_ms == waiting.timeline.makespan
    assert going_on.iteration_ms == pytest.approx(going_on.timeline.cost, rel=1e-3)
    assert going_on.iteration_ms < 0.95 * waiting.iteration_ms


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "the first stage waits for the last, because the gradients of the embedding"),
        pytest.param(
            [UNTIED, "--calculate-per-token-loss"],
            "the first stage waits for the last, because --calculate-per-token-loss",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_post_validation_gains_where_the_first_stage_need_not_wait_for_the_last(flags, reason, capsys):
    bound = job(*LARGE, *POST_VALIDATION, *flags, tool=FOUR)
    waiting, in_a_v = estimate(bound, "zb-h2"), estimate(bound, "zb-v")
    assert waiting.iteration_ms == waiting.timeline.makespan
    assert in_a_v.iteration_ms < in_a_v.timeline.makespan
    command = [*FOUR, "--schedule", "zb-h2", "--schedule", "zb-v", "--", *LARGE, *POST_VALIDATION]
    assert main([*command, *flags]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "gains nothing" in line]
    assert line.startswith(f"--zero-bubble-post-validation gains nothing, except in a V: {reason}")
    assert main([*command, UNTIED]) == 0
    assert "gains nothing" not in capsys.readouterr().out


def test_a_profile_replaces_operations(tmp_path):
    args = arguments()
    file = tmp_path / "profile.json"
    costs = StageCosts.uniform(2, 10, 11, 9, 1, 2**30, -(2**29), -(2**29))
    file.write_text(profile_to_json(Profile(Placement("linear", 2), costs, 0.0, JobFlags.of(args).model)))
    found = job(*SMALL, "--global-batch-size", "8", tool=["--world-size", "2", "--profile", str(file)])
    assert estimate(found, "1f1b").timeline.costs == costs
    assert estimate(found, "zb-v").timeline.costs.time_f == pytest.approx((5,) * 4)
    assert max(estimate(found, "1f1b").activation_bytes) == 2 * 2**30


def test_the_output_of_a_linear_profile_stays_in_the_last_stage(tmp_path):
    """In a V, the last stage is on the first rank."""
    layer, output = UnitCosts(10, 11, 9, 6, -2, -4), UnitCosts(20, 22, 18, 2, -1, -1)
    costs = ModelCosts(UnitCosts(0, 0, 0), (layer,) * 4, output, 1).of_stages((2, 2), Placement("linear", 2))
    file = tmp_path / "profile.json"
    file.write_text(profile_to_json(Profile(Placement("linear", 2), costs, 0.0, JobFlags.of(arguments()).model)))
    found = job(*SMALL, "--global-batch-size", "8", tool=["--world-size", "2", "--profile", str(file)])
    for placement in (Placement("v", 2, 2), Placement("interleaved", 2, 2)):
        assert found.stage_costs(placement).time_f == pytest.approx((10, 10, 10, 30))
        assert found.stage_costs(placement).memory_f == pytest.approx((6, 6, 6, 8))


def test_a_profile_of_a_chosen_layout_gives_the_costs_of_other_stages(tmp_path):
    """The flags of a job that chose its layout do not name the layout, and the estimate's schedules have others."""
    layer, output = UnitCosts(10, 11, 9, 6, -2, -4), UnitCosts(20, 22, 18)
    chosen = ModelCosts(UnitCosts(0, 0, 0), (layer,) * 8, output, 1).of_stages((5, 3), Placement("linear", 2))
    model = {**JobFlags.of(arguments()).model, "pipeline_model_parallel_layout": "Ettttt|tttL"}
    model["attention_backend"] = "local"  # as measured on a CPU
    file = tmp_path / "profile.json"
    file.write_text(profile_to_json(Profile(Placement("linear", 2), chosen, 0.0, model)))
    flags = [*SMALL, "--global-batch-size", "8", "--zero-bubble"]
    found = job(*flags, tool=["--world-size", "2", "--profile", str(file)])
    assert found.stage_costs(Placement("linear", 2)).time_f == pytest.approx((40, 60))
    assert found.stage_costs(Placement("v", 2, 2)).memory_f == pytest.approx((12, 12, 12, 12))
    assert not any(found.stage_costs(Placement("v", 2, 2)).time_r)


def test_the_table_names_every_schedule_and_the_refused_ones(capsys):
    flags = [*SMALL, "--num-layers", "6", "--global-batch-size", "8"]
    assert main(["--world-size", "2", "--per-rank", "--", *flags]) == 0
    output = capsys.readouterr().out
    [refused] = [line for line in output.splitlines() if "--num-layers 6 is not a multiple of the 4 stages" in line]
    assert {"zb-v", "v-half", "v-min"} <= set(refused.split(": --num-layers")[0].split(", "))
    assert "zb-h1, rank 1" in output
    assert "bytes a parameter: 4 + 4 for its gradient + 8 for Adam" in output
    totals = job(*flags, tool=["--world-size", "2"]).flops(Placement("linear", 2))
    assert f"1 : {totals.b / totals.f:.3f} : {totals.w / totals.f:.3f}" in output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--world-size", "2", "--", *SMALL, "--num-laers", "2"], "--num-laers"),
        (["--world-size", "2", "--", *SMALL, "--num-attention-heads", "5"], "--hidden-size 48"),
        (["--world-size", "2", "--device-memory", "80", "--", *SMALL], "expected bytes such as 80GiB"),
        (["--world-size", "2", "--mfu", "1.5", "--", *SMALL], "--mfu: must not be above 1"),
        (
            ["--world-size", "3", "--", *SMALL],
            "do not divide the 3 ranks of the job: --world-size must give a multiple of",
        ),
        (["--world-size", "2", "--profile", "nowhere.json", "--", *SMALL], "nowhere.json"),
        (["--world-size", "2", "--schedule", "zb-h9", "--", *SMALL], "zb-h9"),
        (["--world-size", "2", "--zero-stage", "4", "--", *SMALL], "--zero-stage"),
        (["--world-size", "2", "--", *SMALL, "--pipeline-model-parallel-size", "1"], "at least 2"),
        (["--world-size", "2", "--", *SMALL, "--moe-layer-freq", "[1"], "--moe-layer-freq: expected a number"),
        (
            ["--world-size", "2", "--", *SMALL, "--no-rope-freq", "3"],
            "megatron-core refuses this model: no_rope_freq=3",
        ),
        (["--", *SMALL], "--world-size"),
        (["--world-size", "2", "--host-bandwidth", "25", "--", *SMALL], "needs --zero-bubble-offload auto"),
        (
            ["--world-size", "4", "--", *SMALL, "--global-batch-size", "16", *OFFLOADED],
            "--zero-bubble-offload auto needs --host-bandwidth",
        ),
    ],
)
def test_a_mistake_is_one_line(flags, words, capsys):
    line = one_line_mistake(main, flags, capsys)
    assert line.startswith("zero-bubble estimate: error: ")
    assert words in line


def test_full_recomputation_is_an_operation_and_1f1b_of_megatron_core_recomputes_in_its_backward(capsys):
    plain = (*LARGE, "--bf16", "--overlap-grad-reduce")
    flags = (*plain, *FULLY)
    costs, kept = (job(*given).stage_costs(Placement("linear", 4)) for given in (flags, plain))
    assert (costs.time_b, costs.memory_f) == (kept.time_b, kept.memory_f), "B and F are what they are without R"
    assert costs.time_r[0] == pytest.approx(costs.time_f[0])
    assert main([*EIGHT, "--schedule", "1f1b", "--schedule", "zb-h1", "--json", "--", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["flops_of_a_microbatch"]["r"] > 0
    inside = simulate(generate("1f1b", 4, job(*flags).flags.most_microbatches), costs.recomputing_in_backward())
    for one in document["schedules"]:
        assert one["ratio_to_1f1b"] == pytest.approx(inside.makespan / one["makespan_ms"])
        assert one["idle"] == pytest.approx(one["imbalance"] + one["bubble_rate"])
        assert one["imbalance"] > 0, "the last stage has the logits"
    assert document["schedules"][0]["ratio_to_1f1b"] > 1
    assert "to 1F1B: to megatron-core's own" in "".join(document["notes"])


def test_planned_recomputation_keeps_everything_unless_the_limit_leaves_no_room():
    planned = (*LARGE, "--bf16", "--zero-bubble", "--zero-bubble-recompute", "planned", "--zero-bubble-memory-limit")
    roomy, tight = (estimate(job(*planned, limit), "auto") for limit in ("1", "0.6"))
    assert (roomy.timeline.schedule.recomputes, tight.timeline.schedule.recomputes) == (False, True)
    assert max(tight.activation_bytes) <= 0.6 * max(roomy.activation_bytes) * (1 + 1e-9)
    with pytest.raises(ScheduleError, match="does not plan recomputation"):
        estimate(job(*planned, "1"), "gpipe")


def test_the_table_says_what_is_offloaded_and_how_much_host_memory_that_takes(capsys):
    flags = ["--world-size", "4", "--schedule", "auto", "--schedule", "1f1b"]
    training = [*SMALL, "--global-batch-size", "16", *OFFLOADED]
    fast, slow = (["--host-bandwidth", speed, "--", *training] for speed in ("100000", "1e-6"))
    assert main([*flags, *fast]) == 0
    heads, auto, baseline = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert heads.endswith("offloaded  host (GiB)")
    assert (auto.split()[0], baseline.split()[-2]) == ("auto", "0.00%")
    by_link = []
    for link in (fast, slow):
        assert main([*flags, "--json", *link]) == 0
        by_link.append(json.loads(capsys.readouterr().out)["schedules"][0])
    one, other = by_link
    assert one["schedule"] == other["schedule"] == "auto"
    assert one["offloaded"] > 0 == other["offloaded"]
    assert max(one["host_bytes"]) > 0 == max(other["host_bytes"])
    assert one["iteration_ms"] < other["iteration_ms"]


def test_layers_that_the_ranks_do_not_divide_are_said_once_and_compared_with_what_megatron_needs(capsys):
    odd = [*LARGE, "--num-layers", "6", "--global-batch-size", "8", "--zero-bubble"]
    assert main([*FOUR, "--schedule", "1f1b", "--schedule", "zb-h1", "--schedule", "auto", "--", *odd]) == 0
    output = capsys.readouterr().out
    assert output.count("--num-layers 6 is not a multiple of") == 1
    given = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert f"schedules on Megatron's split are estimated with {given}, with which Megatron runs it" in output
    assert "\n1f1b " in output
    assert main([*FOUR, "--json", "--schedule", "1f1b", "--", *odd]) == 0
    [found] = json.loads(capsys.readouterr().out)["schedules"]
    even = [*odd, "--zero-bubble-keep-layout", *given.split()]
    assert main([*FOUR, "--json", "--schedule", "1f1b", "--", *even]) == 0
    [expected] = json.loads(capsys.readouterr().out)["schedules"]
    assert found == expected
