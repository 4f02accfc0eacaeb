"""What every stage computes before the first step leaves nothing behind: the numbers stay the same, byte for byte.

`make test` runs the model with most to restore and the model that is sharded over replicas; those that are exhaustive
have less to restore.
"""

from __future__ import annotations

import pytest

from tests.changes import WarmedUp
from tests.launch import TINY_GPT
from tests.trainings import Trainings

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
    "sharded": ("--zero-bubble-schedule", "zb-h1", "--use-torch-fsdp2", "--untie-embeddings-and-output-weights"),
    "last-microbatch": ("--zero-bubble-schedule", "zb-h1", "--global-batch-size", "2", "--overlap-grad-reduce"),
}


IN_MAKE_TEST = ("overlap", "sharded")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Trainings on two pipelines of two ranks; those named `warm-*` compute before their first step."""
    flags = {}
    for model, more in MODELS.items():
        flags[model] = [*COMMON, *more]
        flags[f"warm-{model}"] = [*COMMON, *more, WarmedUp()]
    return Trainings(4, flags, tmp_path_factory.mktemp("warm_up"))


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in IN_MAKE_TEST else pytest.mark.exhaustive) for model in MODELS]
)
def test_numbers_are_those_without(trainings: Trainings, model: str) -> None:
    trainings.run(model, f"warm-{model}")
    assert trainings.numerics(f"warm-{model}") == trainings.numerics(model)
    assert trainings.printed(f"warm-{model}").splitlines().count("warmed up") == 1
    assert "warmed up" not in trainings.printed(model)


@pytest.mark.exhaustive
def test_further_losses_are_those_without(trainings: Trainings) -> None:
    """The losses of further tokens, which a process adds up in one place, do not count the warm-up."""
    lines = [
        [line.split("|") for line in trainings.printed(name).splitlines() if "lm loss" in line]
        for name in ("further-tokens", "warm-further-tokens")
    ]
    losses = [[[field for field in line if "loss" in field] for line in output] for output in lines]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
