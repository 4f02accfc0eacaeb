"""Whole trainings by NCCL's rules: what gloo forgives would show as NaN or as other numbers.

`make test` runs the cases with the most channels between ranks and the most to undo. What is exhaustive has other
delays, or parts of what those have.
"""

from __future__ import annotations

import pytest

from tests.changes import InfiniteGradient, NcclRules
from tests.launch import TINY_GPT
from tests.trainings import Trainings

FP16 = ("--fp16", "--initial-loss-scale", "65536", "--hysteresis", "1", "--loss-scale-window", "4")
CASES = {
    "zb-h1": ("--zero-bubble-schedule", "zb-h1"),
    "planned, interleaved": (
        *(
            "--zero-bubble",
            "--zero-bubble-keep-layout",
            "--num-layers",
            "4",
            "--num-layers-per-virtual-pipeline-stage",
            "1",
        ),
        *("--zero-bubble-profile-iters", "2", "4", "--attention-dropout", "0", "--hidden-dropout", "0"),
    ),
    "a V, steps rolled back": (
        *("--zero-bubble-schedule", "zb-v", "--bf16", "--untie-embeddings-and-output-weights", "--clip-grad", "1.3"),
        *("--zero-bubble-post-validation", "--zero-bubble-profile-iters", "0", "0"),
    ),
    "fp16, steps skipped and rolled back": (
        *("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation", *FP16, "--clip-grad", "1.3"),
        *(InfiniteGradient(5, rank=1), InfiniteGradient(8, rank=0)),
    ),
}
SEEDS = (0, 1)
IN_MAKE_TEST = ("planned, interleaved", "a V, steps rolled back")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Each case over gloo as it is, and by NCCL's rules with each seed."""
    flags = {}
    for case, more in CASES.items():
        flags[case] = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", *more]
        flags |= {f"{case} {seed}": [*flags[case], NcclRules(seed)] for seed in SEEDS}
    return Trainings(2, flags, tmp_path_factory.mktemp("rules"))


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in SEEDS[1:])])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in IN_MAKE_TEST else pytest.mark.exhaustive) for case in CASES]
)
def test_the_numbers_are_those_over_gloo(trainings: Trainings, case: str, seed: int) -> None:
    trainings.run(case, f"{case} {seed}")
    numerics = trainings.numerics(case)
    assert len(numerics.splitlines()) == 10
    assert trainings.numerics(f"{case} {seed}") == numerics
    for name in (case, f"{case} {seed}"):
        assert ("undone steps of each rank: [0, 0]" in trainings.printed(name)) != ("rolled back" in case)
