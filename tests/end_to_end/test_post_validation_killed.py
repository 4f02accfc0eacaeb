"""Killed around an optimizer step that is not validated yet, and resumed: as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.changes import KILLED_AT, KilledAroundValidation
from tests.launch import TINY_GPT
from tests.trainings import run_trainings

FLAGS = (
    *TINY_GPT,
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "14", "--bf16"),
    *("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation", "--clip-grad", "0.3"),
)
RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@pytest.mark.exhaustive  # test_resume.py kills and resumes a training in `make test`
@pytest.mark.parametrize("more", [(), RECOMPUTED], ids=["", "recomputed"])
def test_killed_in_a_step_before_its_validation_and_in_a_rollback(tmp_path: Path, more: tuple[str, ...]) -> None:
    """A run is killed at three places in turn, and resumed from its last checkpoint each time."""
    checkpoints = tmp_path / "checkpoints"

    def flags(folder: Path) -> list[str]:
        return [*FLAGS, *more, "--save", str(folder), "--save-interval", "3"]

    run_trainings(2, {"whole": flags(tmp_path / "whole")}, tmp_path)
    load = ("--load", str(checkpoints))
    saved = []
    for number, place in enumerate(KILLED_AT):
        cut = [*flags(checkpoints), *(load if number else ()), KilledAroundValidation(place, times=5)]
        run_trainings(2, {"cut": cut}, tmp_path, status=-signal.SIGKILL)
        saved.append((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert saved == ["3", "6", "9"]
    run_trainings(2, {"cut": [*flags(checkpoints), *load]}, tmp_path)
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
