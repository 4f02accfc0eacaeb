"""Whole trainings by NCCL's rules: what gloo forgives would show as NaN or as other numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import TINY_GPT, run_trainings
from tests.several_trainings import FAULT, RULES

FP16 = ("--fp16", "--initial-loss-scale", "65536", "--hysteresis", "1", "--loss-scale-window", "4")
CASES = {
    "zb-h1": ("--zero-bubble-schedule", "zb-h1"),
    "planned, interleaved": (
        *("--zero-bubble", "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"),
        *("--zero-bubble-profile-iters", "2", "4", "--attention-dropout", "0", "--hidden-dropout", "0"),
    ),
    "a V, steps rolled back": (
        *("--zero-bubble-schedule", "zb-v", "--bf16", "--untie-embeddings-and-output-weights", "--clip-grad", "1.3"),
        *("--zero-bubble-post-validation", "--zero-bubble-profile-iters", "0", "0"),
    ),
    "fp16, steps skipped and rolled back": (
        *("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation", *FP16, "--clip-grad", "1.3"),
        *(f"{FAULT}5@1", f"{FAULT}8@0"),
    ),
}
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The numerics of each case, over gloo as it is and by NCCL's rules."""
    folder = tmp_path_factory.mktemp("rules")
    trainings = {}
    for case, more in CASES.items():
        sizes = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "4")
        trainings[case] = [*TINY_GPT, *sizes, *more]
        trainings |= {f"{case} {seed}": [*trainings[case], f"{RULES}{seed}"] for seed in SEEDS}
    printed = run_trainings(2, trainings, folder)
    for name, text in printed.items():
        assert ("undone steps of each rank: [0, 0]" in text) != ("rolled back" in name), text
    return folder


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_over_gloo(folder: Path, case: str, seed: int) -> None:
    numerics = (folder / f"{case}.jsonl").read_bytes()
    assert len(numerics.splitlines()) == 10
    assert (folder / f"{case} {seed}.jsonl").read_bytes() == numerics
