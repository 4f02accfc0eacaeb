"""A job that restores its layout from a checkpoint begins with the flags of the first job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.planner.megatrons_split import megatrons_layout
from megatron.zero_bubble.schedule import Placement, StageCosts
from megatron.zero_bubble.schedule.formats import Profile, profile_from_json, profile_to_json
from megatron.zero_bubble.session.layout_choice import LIMITS, ChosenLayout
from megatron.zero_bubble.session.layout_words import flags_of_layout
from megatron.zero_bubble.session.profiling import given_profile, restored_text
from megatron.zero_bubble.session.settings import JobSettings, job_settings
from tests.checked_flags import checked_job

SPLIT = ChosenLayout(flags_of_layout(megatrons_layout(8, 4), None, None), is_megatrons_split=True)
IN_V = ChosenLayout(
    {**SPLIT.flags, "pipeline_model_parallel_layout": None, "zero_bubble_placement": "v", LIMITS: (1e9,) * 4}
)
SHARDED = ChosenLayout({**SPLIT.flags, "zero_bubble_vocabulary_parallel": "on"})
NOT_PROFILED = {"--zero-bubble-profile-iters": "0 0"}


def restored(choice: ChosenLayout, flags: dict[str, str | None]) -> JobSettings:
    first = checked_job({"--zero-bubble": None, **flags})
    return job_settings(first.flags, {}, has_cuda=False, choice=choice)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A profile of Megatron's split."""
    model = checked_job({"--zero-bubble": None, "--zero-bubble-keep-layout": None}).flags.model
    costs = StageCosts.uniform(4)
    path = tmp_path / "profile.json"
    path.write_text(profile_to_json(Profile(Placement("linear", 4), costs, 0.1, model)))
    return path


@pytest.mark.parametrize("choice", [IN_V, SHARDED])
@pytest.mark.parametrize("flags", [{}, NOT_PROFILED])
def test_a_profile_of_another_layout_is_dropped_with_a_line(
    file: Path, flags: dict[str, str | None], choice: ChosenLayout
) -> None:
    job = restored(choice, {"--zero-bubble-profile-input": str(file), **flags})
    assert job.planning.has_costs is not bool(flags)
    assert job.planning.profile is None
    assert restored_text(job.flags, job.planning, "FOLDER").splitlines() == [
        " > layout: that of the checkpoint in --load FOLDER",
        f" > --zero-bubble-profile-input {file} has no effect: it was measured with another layout",
    ]


def test_a_profile_of_the_restored_layout_is_kept(file: Path) -> None:
    job = restored(SPLIT, {"--zero-bubble-profile-input": str(file)})
    assert job.planning.profile is not None
    assert len(restored_text(job.flags, job.planning, "FOLDER").splitlines()) == 1


def test_a_profile_of_chosen_shards_is_kept_in_a_job_with_the_same_shards(file: Path) -> None:
    """The job that chose the shards has no flag for them, so that only the profile's costs tell."""
    profile = profile_from_json(file.read_text())
    shard = {"time_e": 0.1, "time_ew": 0.1, "time_s": 1.0, "time_t": 0.5}
    costs = profile.costs.with_shards(profile.placement, shard)
    file.write_text(profile_to_json(replace(profile, costs=costs)))
    flags: dict[str, str | None] = {"--zero-bubble-profile-input": str(file)}
    assert restored(SHARDED, flags).planning.profile is not None
    assert restored(SPLIT, flags).planning.profile is None


@pytest.mark.parametrize("choice", [SPLIT, IN_V])
def test_a_limit_without_measured_costs_begins_again(choice: ChosenLayout) -> None:
    job = restored(choice, {"--zero-bubble-memory-limit": "40GiB", **NOT_PROFILED})
    assert not job.planning.has_costs
    assert restored_text(job.flags, job.planning, "FOLDER").splitlines()[1:] == [
        " > --zero-bubble-memory-limit 40GiB: schedules keep to 1F1B's peak, because --zero-bubble-profile-iters 0 0 "
        "measures no costs"
    ]


def test_a_file_of_layer_costs_is_not_written(tmp_path: Path) -> None:
    job = restored(SPLIT, {"--zero-bubble-unit-costs-output": str(tmp_path / "costs")})
    assert restored_text(job.flags, job.planning, "FOLDER").splitlines()[1:] == [
        f" > --zero-bubble-unit-costs-output {tmp_path / 'costs'} is not written: no layers are measured"
    ]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("noise", float("nan"), "noise must be at least 0, got nan"),
        ("noise", -1, "noise must be at least 0, got -1.0"),
        ("pipeline_model_parallel_layout", 5, "pipeline_model_parallel_layout must be of type str, got 5"),
    ],
)
def test_a_damaged_profile_is_one_line(file: Path, key: str, value: object, reason: str) -> None:
    document = json.loads(file.read_text())
    (document if key in document else document["model"])[key] = value
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"^--zero-bubble-profile-input {file}: [^\n]*{reason}$"):
        checked_job({"--zero-bubble": None, "--zero-bubble-profile-input": str(file)})


def test_without_the_flag_there_is_no_profile() -> None:
    assert given_profile(checked_job({"--zero-bubble": None}).flags) is None
