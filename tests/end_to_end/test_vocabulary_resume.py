"""A training with vocabulary shards that is killed goes on, with shards and without, as if nothing had happened.

All are exhaustive. In `make test` `test_resume.py` kills a training, and `test_vocabulary_stage_checkpoint.py` moves
the states of shards.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.changes import KilledRank
from tests.launch import TINY_GPT
from tests.trainings import run_trainings

SPREAD = ("--zero-bubble-vocabulary-parallel",)
FLAGS = (
    *(*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "8"),
    *("--clip-grad", "1.3", "--lr-decay-style", "cosine", "--lr-warmup-iters", "2"),
    *("--eval-interval", "2", "--eval-iters", "1"),
    # Weights and dropout are then the same in every placement.
    "--zero-bubble-seed-by-layer",
)
ZB_2P = ("--zero-bubble-schedule", "zb-2p")
CASES = [
    pytest.param(2, ZB_2P, id="tied"),
    pytest.param(
        2,
        (*ZB_2P, "--untie-embeddings-and-output-weights", "--bf16", "--zero-bubble-post-validation"),
        id="untied, bf16, post-validation",
    ),
    pytest.param(2, ("--zero-bubble-schedule", "zb-v"), id="in a V"),
    pytest.param(2, (*ZB_2P, "--hybrid-layer-pattern", "*-*-", "--position-embedding-type", "rope"), id="hybrid"),
    pytest.param(
        4,
        (*ZB_2P, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        id="two replicas, all overlapped",
    ),
    pytest.param(4, (*ZB_2P, "--tensor-model-parallel-size", "2"), id="tensor parallel"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_ranks", "flags"), CASES)
def test_killed_in_a_step_and_resumed(num_ranks: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    """A rank dies in the fifth step. The job goes on from the checkpoint of the third, with shards and without."""
    checkpoints, numerics = tmp_path / "checkpoints", {name: tmp_path / f"{name}.jsonl" for name in ("uncut", "cut")}
    spread = [*FLAGS, *flags, *SPREAD]
    save = ["--save", str(checkpoints), "--save-interval", "3"]
    run_trainings(
        num_ranks, {"uncut": spread, "cut": [*spread, *save, KilledRank(5, rank=1)]}, tmp_path, status=-signal.SIGKILL
    )
    assert numerics["uncut"].read_bytes().startswith(numerics["cut"].read_bytes())
    assert numerics["cut"].read_text().count("\n") in (3, 4)
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3"
    # The first of these ends with a checkpoint of its own, so it comes last.
    load = ["--load", str(checkpoints)]
    run_trainings(num_ranks, {"whole": [*FLAGS, *flags, *load], "cut": [*spread, *load, *save]}, tmp_path)
    assert numerics["cut"].read_bytes() == numerics["uncut"].read_bytes()
    assert_rounding_apart(
        tmp_path / "whole.jsonl", numerics["uncut"], after=3, bound=1e-2 if "--bf16" in flags else 1e-6
    )


def assert_rounding_apart(resumed: Path, uncut: Path, after: int, bound: float) -> None:
    """Assert that the first two iterations `after` a checkpoint have the same losses but for rounding."""
    ours, theirs = ([json.loads(line) for line in path.read_text().splitlines()] for path in (resumed, uncut))
    assert [line["iteration"] for line in ours] == [line["iteration"] for line in theirs[after:]]
    for mine, other in zip(ours[:2], theirs[after:], strict=False):
        assert float.fromhex(mine["lm_loss"]) == pytest.approx(float.fromhex(other["lm_loss"]), rel=bound)
