"""The estimate chooses the layout that a training would choose, and prints its flags."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from estimated_jobs import FOUR
from flagged_job import JOB, LIMIT, lines_of, room_for

from megatron.zero_bubble.cli.estimate import results
from megatron.zero_bubble.cli.estimate_command import main

RECOMPUTED = ["--recompute-num-layers", "1"]


def layout_of(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    assert main([*FOUR, "--json", "--schedule", "auto", *command]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_layout_is_the_one_that_a_training_would_choose_and_its_flags_give_the_same_estimate(capsys):
    output = lines_of(capsys, "--schedule", "auto", "--", *JOB, "--zero-bubble", LIMIT, "auto")
    start = next(k for k, line in enumerate(output) if line.startswith(" > layout chosen for 4 ranks and 8 "))
    assert any(line.startswith("     chosen: ") for line in output[start:])
    assert "the same layout in another run: --pipeline-model-parallel-layout " in output[-1]
    layout = layout_of(capsys, "--", *JOB, "--zero-bubble", LIMIT, "auto")["layout"]
    assert layout["flags"] == output[-1].split("another run: ")[1]
    # Units add up to what stages are estimated to need.
    [row] = layout_of(capsys, "--", *JOB, "--zero-bubble", LIMIT, "auto", *shlex.split(layout["flags"]))["schedules"]
    assert row["state_bytes"] == pytest.approx(layout["state_bytes"])
    assert row["imbalance"] == pytest.approx(layout["imbalance"], abs=0.02)
    assert row["iteration_ms"] == pytest.approx(layout["iteration_ms"], rel=0.02)
    assert layout_of(capsys, "--", *JOB)["layout"] is None


@pytest.mark.exhaustive  # all schedules and layouts twice
def test_a_large_job_is_planned_quickly_unless_a_schedule_is_named(capsys, monkeypatch):
    monkeypatch.setattr(results, "LARGE_JOB", 1)
    flags = ["--", *JOB, "--global-batch-size", "96", "--zero-bubble", LIMIT, "auto"]

    def answer(*named: str) -> dict[str, Any]:
        assert main([*FOUR, "--json", *named, *flags]) == 0
        return json.loads(capsys.readouterr().out)

    quick, full = answer(), answer("--schedule", "zb-1p", "--schedule", "zb-v")
    line = "planned with little effort: --schedule NAME plans a large job as its training will"
    assert any(note.startswith(line) for note in quick["notes"])
    assert not any("little effort" in note for note in full["notes"])
    rows = {row["schedule"]: row for row in quick["schedules"]}
    for row in [*full["schedules"], full["layout"]]:
        other = quick["layout"] if row is full["layout"] else rows[row["schedule"]]
        # The simplest layout is chosen among layouts within 2% of the fastest, so a shorter plan may change the choice.
        assert other["iteration_ms"] == pytest.approx(row["iteration_ms"], rel=0.04 if row is full["layout"] else 0.02)
        assert other["bubble_rate"] == pytest.approx(row["bubble_rate"], abs=0.02)
    output = lines_of(capsys, *flags)
    assert any(line.startswith(" > layout chosen for 4 ranks and 48 microbatches") for line in output)


@pytest.mark.exhaustive  # the layouts of two jobs
def test_where_no_schedule_is_possible_or_fits_the_layout_is_the_way_out(capsys):
    tight = room_for("1f1b", "--recompute-granularity", "full", "--recompute-method", "uniform", *RECOMPUTED)
    output = lines_of(capsys, *tight, "--schedule", "1f1b", "--", *JOB, "--zero-bubble")
    [line] = [line for line in output if line.startswith("nothing fits, but with --pipeline-model-parallel-layout ")]
    assert "--zero-bubble-recompute planned --zero-bubble-memory-limit auto auto does (" in line
    odd = [*JOB, "--num-layers", "30", "--zero-bubble"]
    answer = layout_of(capsys, "--", *odd)
    assert answer["schedules"] == []
    assert "--num-layers 30 is not a multiple of the" in answer["refused"]["auto"]
    assert sum(answer["layout"]["partition"]) == 30
    assert min(answer["parameters_per_rank"]) > 0


@pytest.mark.exhaustive  # test_layout_choice.py has the choice; this test searches four times
def test_a_layout_that_megatrons_flags_fix_is_compared_with_all_others(capsys):
    """A V is predicted 2% faster than two interleaved chunks; with a large vocabulary shards on these are the best."""
    given = "--num-layers-per-virtual-pipeline-stage 1"
    flags = ["--", *JOB, "--zero-bubble", *given.split()]
    assert main([*FOUR, "--schedule", "1f1b", "--json", *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    other = answer["freed_layout"]
    assert "--zero-bubble-placement v" in other["flags"]
    assert "--zero-bubble-placement interleaved" in answer["layout"]["flags"]
    assert any(
        note.startswith(f"without {given} --zero-bubble would choose another layout (") for note in answer["notes"]
    )
    assert main([*FOUR, "--schedule", "1f1b", *flags, "--vocab-size", "120000"]) == 0
    assert f"no layout is predicted to be 2% faster than with {given}" in capsys.readouterr().out
