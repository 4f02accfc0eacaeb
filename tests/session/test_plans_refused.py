"""Profiles, schedule files and memory limits that do not fit the run are refused at start-up, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, StageCosts, with_post_validation
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json, schedule_to_json
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.plans import other_numbers_line
from megatron.zero_bubble.session.reports import describe_plan
from megatron.zero_bubble.trainer.model import transformer_config
from tests.checked_flags import checked, checked_job

PLANNED = {"--zero-bubble": None, "--global-batch-size": "16"}
KEPT: dict[str, str | None] = {"--zero-bubble-keep-layout": None}
"""Keeps the layout: without this flag a profile of another layout is not refused, but used to choose a layout."""
SCHEDULE = generate("zb-h1", 4, 8)


def refusal(changes: dict[str, str | None]) -> str:
    """The one line with which these flags are refused."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked({**PLANNED, **changes})
    return str(error.value)


def profile_of(changes: dict[str, str | None], path: Path, *, has_cuda: bool = False) -> str:
    """A file with the profile of a run with these changes."""
    num_ranks = int(changes.get("--pipeline-model-parallel-size") or 4)
    job = checked_job({**PLANNED, **changes}, world_size=num_ranks, has_cuda=has_cuda)
    profile = Profile(job.placement, StageCosts.uniform(job.placement.num_stages), 0.0, job.flags.model)
    path.write_text(profile_to_json(profile))
    return str(path)


def schedule_file(schedule: Schedule, path: Path) -> dict[str, str | None]:
    path.write_text(schedule_to_json(schedule))
    return {"--zero-bubble-schedule": f"file:{path}"}


def test_a_profile_of_the_same_run_is_planned_with(tmp_path: Path):
    file = profile_of({}, tmp_path / "profile.json")
    assert checked({**PLANNED, "--zero-bubble-profile-input": file}).zero_bubble_profile_input == file


def test_a_profile_of_the_same_layers_by_other_flags_is_planned_with(tmp_path: Path):
    file = profile_of({"--pipeline-model-parallel-layout": "Ett|tt|tt|ttL"}, tmp_path / "profile.json")
    assert checked({**PLANNED, **KEPT, "--zero-bubble-profile-input": file}).zero_bubble_profile_input == file


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"--pipeline-model-parallel-size": "2"}, "num_ranks 2, this run has 4"),
        ({"--num-virtual-stages-per-pipeline-rank": "2"}, "kind interleaved, this run has linear"),
        ({"--hidden-size": "128"}, "hidden_size 128, this run has 64"),
        ({"--num-layers": "4"}, "num_layers 4, this run has 8"),
        ({"--bf16": None}, "bf16 True, this run has False"),
        ({"--attention-backend": "flash"}, "attention_backend flash, this run has local"),
        ({"--micro-batch-size": "1"}, "micro_batch_size 1, this run has 2"),
        (
            {"--pipeline-model-parallel-layout": "Ettt|tt|tt|tL"},
            "pipeline_model_parallel_layout Ettt|tt|tt|tL, this run has None",
        ),
    ],
)
def test_a_profile_of_another_run_is_refused(changes, difference, tmp_path: Path):
    file = profile_of(changes, tmp_path / "profile.json")
    line = refusal({**KEPT, "--zero-bubble-profile-input": file})
    assert line == f"--zero-bubble-profile-input {file}: the profile was measured with {difference}"


EXPERTS = {"--num-experts": "4", "--moe-ffn-hidden-size": "48", "--disable-bias-linear": None}
LATENT = {"--multi-latent-attention": None, "--q-lora-rank": "16", "--kv-lora-rank": "16"}


@pytest.mark.parametrize(
    ("model", "changes", "difference"),
    [
        (EXPERTS, {"--moe-ffn-hidden-size": "96"}, "moe_ffn_hidden_size 96, this run has 48"),
        (EXPERTS, {"--moe-ffn-hidden-size": None}, "moe_ffn_hidden_size 256, this run has 48"),
        (EXPERTS, {"--moe-layer-freq": "[0]*2+[1]*6"}, "moe_layer_freq [0, 0, 1, 1, 1, 1, 1, 1], this run has 1"),
        (EXPERTS, {"--moe-router-topk": "1"}, "moe_router_topk 1, this run has 2"),
        (
            {**EXPERTS, "--moe-shared-expert-intermediate-size": "64"},
            {"--moe-shared-expert-intermediate-size": "32"},
            "moe_shared_expert_intermediate_size 32, this run has 64",
        ),
        (LATENT, {"--kv-lora-rank": "32"}, "kv_lora_rank 32, this run has 16"),
        (LATENT, {"--v-head-dim": "64"}, "v_head_dim 64, this run has 128"),
    ],
)
def test_a_profile_of_other_experts_or_latent_attention_is_refused(model, changes, difference, tmp_path: Path):
    measured = {name: value for name, value in {**model, **changes}.items() if value or name not in changes}
    file = profile_of(measured, tmp_path / "profile.json")
    line = refusal({**KEPT, **model, "--zero-bubble-profile-input": file})
    assert line == f"--zero-bubble-profile-input {file}: the profile was measured with {difference}"


def test_how_experts_are_balanced_does_not_change_what_they_cost(tmp_path: Path):
    file = profile_of({**EXPERTS, "--moe-aux-loss-coeff": "0.5"}, tmp_path / "profile.json")
    assert checked({**PLANNED, **EXPERTS, "--zero-bubble-profile-input": file}).zero_bubble_profile_input == file


def test_a_configuration_describes_the_model_as_the_flags_do():
    """A loop that is not Megatron-LM's has megatron-core's configuration alone."""
    flags = checked({**EXPERTS, **LATENT, "--swiglu": None})
    config = transformer_config(flags, 1, None)
    described = JobFlags.of(config).model
    sizes = ("num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "kv_lora_rank", "v_head_dim", "swiglu")
    assert {name: described[name] for name in sizes} == {name: JobFlags.of(flags).model[name] for name in sizes}


def test_megatron_lm_fills_in_how_ranks_share_experts():
    ours = checked({**PLANNED, "--num-experts": "4", "--disable-bias-linear": None})
    theirs = replace(ours, expert_tensor_parallel_size=1, moe_ffn_hidden_size=ours.ffn_hidden_size)
    theirs = replace(theirs, moe_router_load_balancing_type=["aux_loss"])
    assert JobFlags.of(theirs).model == JobFlags.of(ours).model


def test_megatron_lm_leaves_one_group_where_keys_are_not_grouped():
    """Megatron-LM's arguments say one group there and ours as many as heads; profiles of both describe one model."""
    ours = checked(PLANNED)
    theirs = replace(ours, num_query_groups=1)
    assert not ours.group_query_attention
    assert JobFlags.of(theirs).model == JobFlags.of(ours).model
    assert JobFlags.of(replace(theirs, group_query_attention=True)).model != JobFlags.of(ours).model


def test_a_profile_of_another_number_of_chunks_is_refused(tmp_path: Path):
    chunks = "--num-virtual-stages-per-pipeline-rank"
    file = profile_of({"--num-layers": "16", chunks: "4"}, tmp_path / "profile.json")
    line = refusal({**KEPT, "--num-layers": "16", chunks: "2", "--zero-bubble-profile-input": file})
    assert line.endswith("the profile was measured with num_chunks 4, this run has 2")


@pytest.mark.parametrize("text", ["", "{}", "not JSON"])
def test_a_file_that_is_no_profile_is_refused(text, tmp_path: Path):
    file = tmp_path / "profile.json"
    file.write_text(text)
    assert refusal({"--zero-bubble-profile-input": str(file)}).startswith(f"--zero-bubble-profile-input {file}: ")


def test_a_schedule_that_lacks_an_operation_is_refused_by_its_name(tmp_path: Path):
    lane = tuple(op for op in SCHEDULE.ops[2] if op != Op(OpKind.W, 5))
    broken = replace(SCHEDULE, ops=(*SCHEDULE.ops[:2], lane, SCHEDULE.ops[3]))
    line = refusal(schedule_file(broken, tmp_path / "broken.json"))
    assert line.startswith(f"--zero-bubble-schedule file:{tmp_path}/broken.json: ")
    assert "rank 2" in line
    assert "W5" in line


def test_a_schedule_that_would_deadlock_never_starts(tmp_path: Path):
    """Rank 1 wants F1 before B0, and rank 0 has B0 before F1."""
    f, b, w = (lambda m, kind=kind: Op(kind, m) for kind in (OpKind.F, OpKind.B, OpKind.W))
    lanes = ((f(0), b(0), w(0), f(1), b(1), w(1)), (f(0), f(1), b(0), w(0), b(1), w(1)))
    broken = Schedule("stuck", Placement("linear", 2), 2, lanes)
    two = {"--pipeline-model-parallel-size": "2", "--global-batch-size": "8"}
    line = refusal({**two, **schedule_file(broken, tmp_path / "stuck.json")})
    assert line.endswith(
        "schedule stuck deadlocks: rank 0 at B0 waits for B0 of stage 1 on rank 1; "
        "rank 1 at F1 waits for F1 of stage 0 on rank 0"
    )


@pytest.mark.parametrize(
    ("schedule", "changes", "problem"),
    [
        (generate("zb-h1", 2, 8), {}, "the schedule is for 2 ranks"),
        (SCHEDULE, {"--global-batch-size": "12"}, "8 microbatches"),
        (
            generate("interleaved-zb", 4, 8),
            {"--num-layers": "16", "--num-virtual-stages-per-pipeline-rank": "4"},
            "the schedule is for 2 chunks a rank, not 4",
        ),
    ],
)
def test_a_schedule_for_another_run_is_refused(schedule, changes, problem, tmp_path: Path):
    line = refusal({**changes, **schedule_file(schedule, tmp_path / "schedule.json")})
    assert line.startswith(f"--zero-bubble-schedule file:{tmp_path}/schedule.json: ")
    assert problem in line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"--zero-bubble-memory-limit": "0.2", **KEPT},
            "--zero-bubble-memory-limit 0.2: schedule auto needs at least 0.25 times 1F1B's peak",
        ),
        (
            {"--zero-bubble-memory-limit": "1.5", "--zero-bubble-schedule": "zb-h2"},
            "--zero-bubble-memory-limit 1.5: schedule zb-h2 needs at least 1.75 times 1F1B's peak",
        ),
        (
            {"--zero-bubble-memory-limit": "0.2", "--zero-bubble-schedule": "zb-v"},
            "--zero-bubble-memory-limit 0.2: schedule zb-v needs at least 0.25 times 1F1B's peak",
        ),
        (
            {"--zero-bubble-max-pending-backward": "5", "--zero-bubble-schedule": "zb-h2"},
            "--zero-bubble-max-pending-backward 5: schedule zb-h2 needs at least 7",
        ),
    ],
)
def test_a_limit_under_the_smallest_possible_is_answered_with_the_smallest(changes, line):
    assert refusal(changes) == line


def test_a_schedule_file_above_the_limit_is_refused(tmp_path: Path):
    file = schedule_file(generate("gpipe", 4, 8), tmp_path / "gpipe.json")
    assert refusal({**file, "--zero-bubble-memory-limit": "1.9"}).endswith("needs at least 2 times 1F1B's peak")
    checked({**PLANNED, **file, "--zero-bubble-memory-limit": "2"})


def test_a_schedule_file_with_post_validation_needs_the_flag(tmp_path: Path):
    given = with_post_validation(SCHEDULE, StageCosts.uniform(4))
    file = schedule_file(given, tmp_path / "schedule.json")
    assert refusal(file) == (
        f"--zero-bubble-schedule file:{tmp_path}/schedule.json: "
        "the schedule's operations STEP and VALIDATE need --zero-bubble-post-validation"
    )
    checked({**PLANNED, **file, "--zero-bubble-post-validation": None})


@pytest.mark.parametrize("limit", ["0", "-1", "much", "1.5 GB a rank", "nan"])
def test_what_is_no_limit_is_refused(limit):
    line = refusal({"--zero-bubble-memory-limit": limit.replace(" ", "_")})
    assert line.startswith("--zero-bubble-memory-limit: ")
    assert "give a multiple of 1F1B's peak (1.5), bytes (40GiB) or auto" in line


def test_two_limits_are_refused():
    both = {"--zero-bubble-memory-limit": "1", "--zero-bubble-max-pending-backward": "4"}
    assert refusal(both) == "give --zero-bubble-memory-limit or --zero-bubble-max-pending-backward, not both"


@pytest.mark.parametrize("name", ["--zero-bubble-memory-limit", "--zero-bubble-max-pending-backward"])
def test_a_limit_that_is_what_the_device_has_free_needs_a_device_in_the_job(name):
    auto = {**PLANNED, name: "auto"}
    assert (
        refusal(auto) == f"{name} auto needs a CUDA device, and there is none: give a multiple (1.5) or bytes (40GiB)"
    )
    checked(auto, has_cuda=True)


@pytest.mark.parametrize("window", ["0 3", "5 4", "-1 3"])
def test_a_window_that_is_none_is_refused(window):
    assert refusal({"--zero-bubble-profile-iters": window}).startswith(f"--zero-bubble-profile-iters {window}: give")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--zero-bubble-memory-limit", "1"),
        ("--zero-bubble-profile-iters", "1 2"),
        ("--zero-bubble-profile-output", "profile.json"),
        ("--zero-bubble-profile-input", "profile.json"),
        ("--zero-bubble-timeline", "timeline"),
        ("--zero-bubble-replan-threshold", "0.1"),
    ],
)
def test_a_flag_of_planning_alone_is_refused(name, value):
    assert refusal({"--zero-bubble": "", name: value}) == f"{name} needs --zero-bubble or --zero-bubble-schedule"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"--zero-bubble-post-validation": None, "--log-num-zeros-in-grad": None},
            "--log-num-zeros-in-grad: the zeros",
        ),
        ({"--zero-bubble-post-validation": None, "--timing-log-level": "2"}, "--timing-log-level 2: its timers"),
        ({"--zero-bubble-rollback": "inverse"}, "--zero-bubble-rollback needs --zero-bubble-post-validation"),
        ({"--zero-bubble-rollback-on-host": None}, "-on-host needs --zero-bubble-post-validation"),
        (
            {
                "--zero-bubble-post-validation": None,
                "--zero-bubble-rollback": "inverse",
                "--zero-bubble-rollback-on-host": None,
            },
            "inverse keeps no copy",
        ),
    ],
)
def test_what_post_validation_cannot_honour_is_refused(changes: dict[str, str | None], words: str):
    assert words in refusal(changes)


def test_the_block_tells_what_r_takes_and_restores_where_anything_is_recomputed():
    mib = 2**20
    costs = StageCosts.uniform(2, memory_f=8 * mib, memory_b=-mib, memory_w=-7 * mib, time_r=1.25, memory_r=6 * mib)
    profile = Profile(Placement("linear", 2), costs, 0.0, {})
    for recompute, baseline in (
        (Recompute.FULL, "1F1B that recomputes in its backward"),
        (Recompute.PLANNED, "1F1B that keeps everything"),
    ):
        block = describe_plan(
            Report(Prediction(profile, generate("zb-h1", 2, 4), recompute), False, None, 6)
        ).splitlines()
        assert block[1].split("  ")[-3:] == ["kept by F (MiB)", "restored by R (MiB)", "for W (MiB)"]
        assert block[2].split() == ["0", "0", "1.00", "1.00", "1.00", "1.25", "0.00", "8.0", "6.0", "7.0"]
        assert block[-2].endswith(f"times as fast as {baseline}")
        assert len(block[1]) == len(block[2]) == len(block[3])


def test_the_block_tells_the_limit_of_each_rank_and_what_operations_need_inside():
    costs = StageCosts.uniform(3, memory_f=2**20, memory_b=-(2**19), memory_w=-(2**19))
    profile = Profile(Placement("linear", 3), costs, 0.0, {}, inside=(0.0, 2.0**21, 0.0))
    limits = (8.0 * 2**20, 6.0 * 2**20, 8.0 * 2**20)
    plan = RunSchedules.named("auto", 3).requesting(costs=costs, memory_limit=limits)
    block = describe_plan(Report(Prediction(profile, plan.schedule(4)), True, limits, 6))
    assert "schedule auto (planned) for 4 microbatches, memory limit 8.0 6.0 8.0 MiB" in block
    assert "temporary memory of operations on each rank, not in these peaks (MiB): 0.0, 2.0, 0.0" in block
    assert "above the memory limit" not in block
    quiet = Report(Prediction(replace(profile, inside=()), plan.schedule(4)), False, (2.0**20,) * 3, 6)
    assert "temporary memory" not in describe_plan(quiet)
    assert "memory limit 1.0 MiB" in describe_plan(quiet), "equal limits are told once"
    assert "above the memory limit" in describe_plan(quiet)


@pytest.mark.parametrize(
    ("dropout", "group", "size", "more"),
    [
        (("0", "0"), None, None, {}),
        (("0.1", "0"), None, 2, {}),
        (("0", "0.1"), None, 2, {}),
        (("0.1", "0.1"), None, None, {"--zero-bubble-seed-by-layer": None}),
        (("0", "0"), "4", 4, {}),
    ],
)
def test_forwards_of_several_chunks_keep_their_order_where_dropout_depends_on_it(dropout, group, size, more):
    changes = {
        "--pipeline-model-parallel-size": "2",
        "--num-virtual-stages-per-pipeline-rank": "2",
        "--microbatch-group-size-per-virtual-pipeline-stage": group or "",
        "--global-batch-size": "8",
        "--zero-bubble": None,
        "--attention-dropout": dropout[0],
        "--hidden-dropout": dropout[1],
        **more,
    }
    assert checked_job(changes, world_size=2).plan.request.group_size == size


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, False),
        ({"--zero-bubble-memory-limit": "0.5"}, True),
        ({"--zero-bubble-memory-limit": "0.5", "--zero-bubble-seed-by-layer": None}, False),
        ({"--zero-bubble-memory-limit": "0.5", "--attention-dropout": "0", "--hidden-dropout": "0"}, False),
    ],
)
def test_a_line_says_that_dropout_draws_other_numbers_than_megatron_cores_order(changes, warns):
    """The promise that numbers are equal holds in megatron-core's order of forwards, which needs its memory."""
    chunks = {"--zero-bubble": None, "--zero-bubble-keep-layout": None, "--num-virtual-stages-per-pipeline-rank": "2"}
    job = checked_job({**chunks, "--global-batch-size": "16", **changes})
    line = other_numbers_line(job.flags, job.plan.schedule(job.flags.most_microbatches))
    assert bool(line) is warns
    if warns:
        assert line.startswith(" > --zero-bubble-memory-limit 0.5: megatron-core's order of forwards, in groups of 4 ")


@pytest.mark.parametrize(
    ("schedule", "size", "most"), [("auto", 1, ""), ("interleaved-zb", 3, True), ("interleaved-zb", 9, True)]
)
def test_a_group_of_microbatches_of_an_impossible_size_is_refused_by_its_flag(schedule, size, most):
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    chunks = {"--zero-bubble-schedule": schedule, "--num-virtual-stages-per-pipeline-rank": "2"}
    with pytest.raises(ValueError, match=rf"^{flag} {size}: give at least 4, the number of pipeline ranks") as error:
        checked_job({**chunks, "--global-batch-size": "16", flag: str(size)})
    assert str(error.value).endswith(", and at most 8, the number of microbatches") is bool(most)
