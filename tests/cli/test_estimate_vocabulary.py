"""Estimates of trainings whose vocabulary is spread over all ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.cli.estimate.arguments import EstimateFlags
from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import estimate
from megatron.zero_bubble.cli.estimate_command import main
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json

MODEL = ["--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"]
MODEL += ["--vocab-size", "65535", "--bf16", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "1"]
MODEL += ["--global-batch-size", "16", "--zero-bubble-schedule", "zb-h1"]
SPREAD, UNTIED = "--zero-bubble-vocabulary-parallel", "--untie-embeddings-and-output-weights"
PLACEMENTS = [Placement("linear", 4), Placement("v", 4, 2)]


def job(*more: str) -> EstimatedJob:
    return EstimatedJob.of(read_flags(EstimateFlags, ["--world-size", "4", "--", *MODEL, *more], "test", ""))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("flags", [(), (UNTIED,)])
def test_every_rank_has_as_much_of_the_tables(placement: Placement, flags: tuple[str, ...]) -> None:
    """Without shards the first and the last stage have a table each, tied or not, even on the same rank."""
    whole, spread = ([sum(held) for held in one.parameters(placement)] for one in (job(*flags), job(*flags, SPREAD)))
    table = 65536 * 1024
    first, last = placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
    expected = [held + (2 if flags else 1) * table // 4 for held in whole]
    expected[first] -= table
    expected[last] -= table
    assert spread == expected


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_work_is_that_of_the_whole_vocabulary_on_other_ranks(placement: Placement) -> None:
    whole, spread = job().stage_costs(placement), job(SPREAD).stage_costs(placement)
    stages = range(placement.num_stages)
    assert sum(map(spread.work, stages)) == pytest.approx(sum(map(whole.work, stages)), rel=1e-3)
    assert max(placement.sums(list(map(spread.work, stages)))) < 0.6 * max(
        placement.sums(list(map(whole.work, stages)))
    )


def test_schedules_have_shards_and_are_compared_with_megatron_cores_without(capsys: pytest.CaptureFixture[str]) -> None:
    def document(*more: str) -> dict[str, Any]:
        names = ["--schedule", "1f1b", "--schedule", "zb-h1"]
        assert main(["--world-size", "4", *names, "--json", "--", *MODEL, *more]) == 0
        return json.loads(capsys.readouterr().out)

    whole, spread = document(), document(SPREAD)
    assert any("without vocabulary shards" in note for note in spread["notes"])
    baseline = whole["schedules"][0]["iteration_ms"]
    for one in spread["schedules"]:
        assert one["ratio_to_1f1b"] == pytest.approx(baseline / one["iteration_ms"])
        assert one["ratio_to_1f1b"] > 1.5
        assert max(one["state_bytes"]) < 1.05 * min(one["state_bytes"])


def test_a_profile_with_shards_also_says_what_the_whole_vocabulary_costs(tmp_path: Path) -> None:
    spread, placement = job(SPREAD), PLACEMENTS[0]
    costs = spread.stage_costs(placement)
    file = tmp_path / "profile.json"
    file.write_text(profile_to_json(Profile(placement, costs, 0.0, spread.flags.model)))
    flags = ["--world-size", "4", "--profile", str(file), "--", *MODEL, SPREAD]
    profiled = EstimatedJob.of(read_flags(EstimateFlags, flags, "test", ""))
    assert estimate(profiled, "zb-h1").timeline.costs == costs
    whole = estimate(profiled.with_flags({"zero_bubble_vocabulary_parallel": "off"}), "1f1b")
    expected = estimate(job(), "1f1b")
    assert whole.iteration_ms == pytest.approx(expected.iteration_ms, rel=0.02)
    assert whole.timeline.costs == replace(whole.timeline.costs, time_s=(), time_t=())
