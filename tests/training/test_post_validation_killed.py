"""Killed around an optimizer step that is not validated yet, and resumed: as if nothing had happened.

It starts a job for every place, in `make test-all`; `test_resume.py` kills and resumes a job in `make test`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.dying_training import DIE, PLACES
from tests.launch import ROOT, TINY_GPT, environment, torchrun

RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SCRIPT = ROOT / "tests" / "dying_training.py"


def train(folder: Path, death: str, *more: str) -> int:
    flags = [
        *TINY_GPT,
        *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "14", "--bf16"),
        *("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation", "--clip-grad", "0.3"),
        *("--save", str(folder / "checkpoints"), "--save-interval", "3", "--log-numerics", str(folder / "numerics")),
        *more,
    ]
    command = torchrun(2, SCRIPT, f"{DIE}{death}", *flags)
    # A pipe would be kept open by what the ranks have started, after they are dead.
    with open(folder / "output", "a") as output:
        return subprocess.run(
            command, env=environment(), stdout=output, stderr=output, timeout=120, check=False
        ).returncode


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [(), RECOMPUTED], ids=["", "recomputed"])
def test_killed_in_a_step_before_its_validation_and_in_a_rollback(tmp_path: Path, more: tuple[str, ...]) -> None:
    """A run is killed at three places in turn, and resumed from its last checkpoint each time."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    assert train(whole, "@0", *more) == 0
    load = ("--load", str(cut / "checkpoints"))
    saved = []
    for number, place in enumerate(PLACES):
        assert train(cut, f"{place}@5", *more, *(load if number else ())) != 0
        saved.append((cut / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == ["3", "6", "9"]
    assert train(cut, "@0", *more, *load) == 0
    assert (cut / "numerics").read_bytes() == (whole / "numerics").read_bytes()
