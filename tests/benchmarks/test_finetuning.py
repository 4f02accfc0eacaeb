"""The benchmark of fine-tuning, and the example whose model it trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, run

EXAMPLE = ROOT / "examples" / "finetune_conversations.py"


@pytest.mark.exhaustive  # test_loop_run.py and test_lengths.py run the same orders
def test_contestants_take_turns_and_predictions_are_compared() -> None:
    job = run(2, ROOT / "tests" / "benchmarks" / "run_finetuning.py", "--steps", "3", "--num-microbatches", "4")
    assert job.returncode == 0, job.stderr[-4000:]
    number = r"\d+\.\d{3}"
    for name in ("1f1b, order of the data", "zb-h1, order of the data", "zb-h1, planned order"):
        assert re.search(rf"{name}: \d+\.\d ms, {number} \({number} \.\. {number}\) times as fast as 1f1b", job.stdout)
    assert re.search(r"measured beside predicted, 3 steps: \d+\.\d% apart in the mean", job.stdout)


@pytest.mark.exhaustive  # two trainings of real compute, as in the next test
def test_the_example_saves_and_goes_on(tmp_path: Path) -> None:
    """With the data's order and a named schedule nothing depends on measured times, so that two runs are equal."""
    fixed = ("--schedule", "zb-h1", "--microbatch-order", "data", "--num-microbatches", "4")
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    printed = []
    for folder, steps in ((stopped, 2), (stopped, 3), (whole, 5)):
        job = run(2, EXAMPLE, *fixed, "--steps", str(steps), "--checkpoint", str(folder))
        assert job.returncode == 0, job.stderr[-4000:]
        printed.append(re.findall(r"step (\d+): loss (\S+),", job.stdout))
    assert printed[0] + printed[1] == printed[2]
    for rank in range(2):
        saved, expected = (torch.load(each / f"rank{rank}.pt", weights_only=False) for each in (stopped, whole))
        assert saved["step"] == 5
        for name, tensor in expected["model"].items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(saved["model"][name], tensor)


@pytest.mark.exhaustive
def test_the_example_plans_its_schedule_and_orders() -> None:
    job = run(2, EXAMPLE, "--steps", "14", "--num-microbatches", "4")
    assert job.returncode == 0, job.stderr[-4000:]
    assert "step 13: loss" in job.stdout
