"""A flag of planning that could do nothing is refused, or the user is told what will be missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.profiling import planning_options, too_short_to_profile, unused_window
from tests.checked_flags import checked, checked_job
from tests.session.planned_flags import KEPT, PLANNED, profile_of, refusal

UNMEASURED = {"--zero-bubble-profile-iters": "0 0"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--zero-bubble-memory-limit", "40GiB"),
        ("--zero-bubble-memory-limit", "auto"),
        ("--zero-bubble-max-pending-backward", "auto"),
        ("--zero-bubble-profile-output", "profile.json"),
        ("--zero-bubble-replan-threshold", "0.1"),
    ],
)
def test_a_flag_that_needs_costs_is_refused_where_none_are_measured(name: str, value: str, tmp_path: Path):
    cuda = {"has_cuda": True}
    file = profile_of({}, tmp_path / "profile.json", **cuda)
    checked({**PLANNED, name: value}, **cuda)
    checked({**PLANNED, **UNMEASURED, "--zero-bubble-profile-input": file, name: value}, **cuda)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked({**PLANNED, **KEPT, **UNMEASURED, name: value}, **cuda)
    assert str(error.value) == (
        f"{name} {value} needs measured costs, and --zero-bubble-profile-iters 0 0 measures none: "
        "give another START END, or --zero-bubble-profile-input FILE"
    )


def test_a_chosen_layout_brings_the_costs_that_bytes_need():
    checked({**PLANNED, **UNMEASURED, "--zero-bubble-memory-limit": "40GiB"})


def test_a_multiple_of_the_peak_needs_no_costs():
    checked({**PLANNED, **UNMEASURED, "--zero-bubble-memory-limit": "1.5", "--zero-bubble-replan-threshold": "0"})
    checked({**PLANNED, **UNMEASURED, "--zero-bubble-max-pending-backward": "5"})


@pytest.mark.parametrize(
    ("changes", "end", "steps"),
    [
        ({"--train-iters": "5"}, 6, 5),
        ({"--exit-interval": "4"}, 6, 4),
        ({"--zero-bubble-profile-iters": "3 11"}, 11, 10),
    ],
)
def test_a_profile_that_is_never_written_is_refused(changes: dict[str, str | None], end: int, steps: int):
    checked({**PLANNED, **changes})
    assert refusal({**changes, "--zero-bubble-profile-output": "costs.json"}) == (
        f"--zero-bubble-profile-output costs.json is written after the last profiled iteration, which is {end}, but "
        f"the job ends after {steps}: give --zero-bubble-profile-iters START END with an END of at most {steps}"
    )
    checked({**PLANNED, **changes, "--zero-bubble-profile-output": "costs.json", "--zero-bubble-profile-iters": "3 4"})


def test_a_job_that_ends_before_its_profile_says_what_is_missing(tmp_path: Path):
    asked = {**PLANNED, "--zero-bubble-profile-output": "costs.json", "--zero-bubble-timeline": "drawings"}
    flags = checked_job(asked).flags
    assert [iteration for iteration in range(11) if too_short_to_profile(flags, iteration)] == [
        *range(5, 10)  # With nothing left to train, nothing is missing.
    ]
    assert too_short_to_profile(flags, 5) == (
        " > no plan from measured times, no --zero-bubble-profile-output, no --zero-bubble-timeline: this job ends "
        "after 5 iterations, but profiling ends after 6; give --zero-bubble-profile-iters START END with an "
        "earlier END, or 0 0 for no profile"
    )
    short = {**PLANNED, "--train-iters": "5"}
    line = too_short_to_profile(checked_job(short).flags, 0)
    assert line is not None
    assert line.startswith(" > no plan from measured times: this job ends after 5 iterations")
    for enough in (
        {"--zero-bubble-profile-iters": "1 5"},
        UNMEASURED,
        {"--zero-bubble-schedule": "zb-h1", **UNMEASURED},
    ):
        assert too_short_to_profile(checked_job({**short, **enough}).flags, 0) is None
    file = profile_of({}, tmp_path / "profile.json")
    assert too_short_to_profile(checked_job({**short, "--zero-bubble-profile-input": file}).flags, 0) is None


def test_a_script_that_counts_samples_is_not_said_to_be_too_short():
    flags = replace(checked_job(PLANNED).flags, train_iters=None)
    assert too_short_to_profile(flags, 0) is None
    assert planning_options(flags, Placement("linear", 4), (2, 2, 2, 2)).has_costs


def test_iterations_that_a_given_profile_leaves_unmeasured_are_told(tmp_path: Path):
    file = profile_of({}, tmp_path / "profile.json")
    job = checked_job({**PLANNED, **KEPT, "--zero-bubble-profile-input": file, "--zero-bubble-profile-iters": "3 9"})
    assert unused_window(job.flags, job.planning) == (
        " > --zero-bubble-profile-iters 3 9: no iteration is profiled, because --zero-bubble-profile-input "
        f"{file} has the costs"
    )
    for changes in ({"--zero-bubble-profile-iters": "3 9"}, {**UNMEASURED, "--zero-bubble-profile-input": file}):
        job = checked_job({**PLANNED, **KEPT, **changes})
        assert unused_window(job.flags, job.planning) is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"--zero-bubble-v-schedule-mem-setup": "zb"},
            "--zero-bubble-v-schedule-mem-setup zb needs --zero-bubble-v-schedule",
        ),
        (
            {"--zero-bubble-schedule": "zb-v", "--zero-bubble-v-schedule-mem-setup": "min"},
            "--zero-bubble-v-schedule-mem-setup min needs --zero-bubble-v-schedule",
        ),
        (
            {"--zero-bubble-schedule": "zb-h1", "--zero-bubble-v-schedule": None},
            "--zero-bubble-schedule zb-h1 and --zero-bubble-v-schedule, which is zb-v: give one of them",
        ),
        (
            {
                "--zero-bubble-schedule": "zb-v",
                "--zero-bubble-v-schedule": None,
                "--zero-bubble-v-schedule-mem-setup": "half",
            },
            "--zero-bubble-schedule zb-v and --zero-bubble-v-schedule, which is v-half: give one of them",
        ),
    ],
)
def test_a_v_schedule_that_would_not_run_is_refused(changes: dict[str, str | None], line: str):
    assert refusal(changes) == line


def test_a_v_schedule_may_be_said_twice():
    both: dict[str, str | None] = {**PLANNED, "--zero-bubble-schedule": "zb-v", "--zero-bubble-v-schedule": None}
    assert checked_job(both).flags.schedule == "zb-v"
