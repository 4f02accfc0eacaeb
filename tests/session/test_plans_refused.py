"""Schedule files, memory limits and flags of planning that do not fit the run are refused at start-up, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, StageCosts, with_post_validation
from tests.checked_flags import checked
from tests.session.planned_flags import KEPT, PLANNED, refusal, schedule_file

SCHEDULE = generate("zb-h1", 4, 8)


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
