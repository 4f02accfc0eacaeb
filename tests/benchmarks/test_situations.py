"""The five situations in which --zero-bubble meets megatron-core's own schedules."""

from __future__ import annotations

import json

import pytest

from benchmarks import situations
from benchmarks.situations import SITUATIONS, main

SMALL = ("--num-layers", "8", "--hidden-size", "32", "--num-attention-heads", "4", "--mock-data")
"""A model so small that ranks take longer to start than to train it."""


@pytest.mark.exhaustive  # three trainings of what tests/cli/test_benchmark.py and test_recomputed_runs.py train
@pytest.mark.parametrize("name", ["memory short"])
def test_a_situation_is_trained_under_both_of_megatron_cores_schedules_and_the_plan(name, tmp_path, monkeypatch):
    monkeypatch.setattr(situations, "_MODEL", SMALL)
    output = tmp_path / "results.json"
    assert main(["--situation", name, "--rounds", "1", "--json", "--output", str(output)]) == 0
    [(situation, results)] = json.loads(output.read_text()).items()
    assert situation == name
    baseline, plan, interleaved = (result["schedule"] for result in results)
    assert baseline == "megatron-core 1F1B"
    assert plan == " ".join(("chosen", *SITUATIONS[name].ours))
    assert interleaved == "megatron-core interleaved, 2 chunks"


def test_a_situation_that_does_not_exist_is_one_line(capsys):
    assert main(["--situation", "no memory"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks.situations: error: argument --situation: invalid choice: 'no memory'")
