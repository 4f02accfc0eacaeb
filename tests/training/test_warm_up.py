"""What every stage computes before the first step leaves nothing behind: the numbers stay the same, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import TINY_GPT, run_trainings
from tests.several_trainings import WARM_UP

COMMON = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", "4"]
MODELS = {
    "default": ("--zero-bubble-schedule", "zb-h1"),
    "two-chunks-that-share-data": (
        *("--zero-bubble-schedule", "interleaved-zb", "--num-virtual-stages-per-pipeline-rank", "2"),
        *("--train-iters", "3"),
    ),
    "v": ("--zero-bubble-schedule", "zb-v"),
    "further-tokens": ("--zero-bubble-schedule", "zb-h1", "--mtp-num-layers", "1"),
    "experts": (
        *("--zero-bubble-schedule", "zb-h1", "--num-experts", "2", "--moe-aux-loss-coeff", "0.01"),
        "--disable-bias-linear",
    ),
    "overlap": (
        *("--zero-bubble-schedule", "zb-2p", "--use-distributed-optimizer", "--overlap-grad-reduce", "--bf16"),
        *("--overlap-param-gather", "--ddp-bucket-size", "4000", "--untie-embeddings-and-output-weights"),
    ),
    "post-validation": ("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation", "--clip-grad", "0.05"),
    "last-microbatch": ("--zero-bubble-schedule", "zb-h1", "--global-batch-size", "2", "--overlap-grad-reduce"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The numerics and the output of each training, on two pipelines of two ranks."""
    folder = tmp_path_factory.mktemp("warm_up")
    trainings = {}
    for model, flags in MODELS.items():
        trainings[model] = [*COMMON, *flags]
        trainings[f"warm-{model}"] = [*COMMON, *flags, WARM_UP]
    outputs = run_trainings(4, trainings, folder)
    for name, output in outputs.items():
        (folder / f"{name}.txt").write_text(output)
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_numbers_are_those_without(folder: Path, model: str) -> None:
    assert (folder / f"warm-{model}.jsonl").read_bytes() == (folder / f"{model}.jsonl").read_bytes()
    assert (folder / f"warm-{model}.txt").read_text().splitlines().count("warmed up") == 1
    assert "warmed up" not in (folder / f"{model}.txt").read_text()


def test_further_losses_are_those_without(folder: Path) -> None:
    """They are added up in one place of the process, and printed."""
    lines = [
        [line.split("|") for line in (folder / f"{name}.txt").read_text().splitlines() if "lm loss" in line]
        for name in ("further-tokens", "warm-further-tokens")
    ]
    losses = [[[field for field in line if "loss" in field] for line in output] for output in lines]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
