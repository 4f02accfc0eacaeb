"""Multi-token prediction under a pipeline: the last stage has further layers and losses, the numbers stay the same.

`make test` runs a model of one chunk a rank and one of two under a schedule of ours, in one start. Exhaustive are the
same layers in other models and schedules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from tests.checked_flags import checked
from tests.launch import TINY_GPT
from tests.trainings import Trainings, run_trainings

ONE_TOKEN = (
    *TINY_GPT,
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "4", "--clip-grad", "0.5"),
)
COMMON = (*ONE_TOKEN, "--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3")
MODELS = {
    "tied": (),
    "untied": ("--untie-embeddings-and-output-weights", "--swiglu", "--disable-bias-linear"),
    "untied-bf16-rope": ("--untie-embeddings-and-output-weights", "--bf16", "--position-embedding-type", "rope"),
    "interleaved": ("--untie-embeddings-and-output-weights", "--num-virtual-stages-per-pipeline-rank", "2"),
}
SCHEDULES = {
    "1f1b": ("--zero-bubble-schedule", "1f1b"),
    "zb-h1": ("--zero-bubble-schedule", "zb-h1"),
    "post-validation": ("--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation"),
}
INTERLEAVED = {
    "interleaved-zb": ("--zero-bubble-schedule", "interleaved-zb"),
    "interleaved-1f1b": ("--zero-bubble-schedule", "interleaved-1f1b"),
}
CASES = [(model, schedule) for model in MODELS for schedule in (INTERLEAVED if model == "interleaved" else SCHEDULES)]


IN_MAKE_TEST = [("tied", "zb-h1"), ("interleaved", "interleaved-zb")]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Trainings on two ranks; those named `base-*` run megatron-core's own schedule."""
    flags: dict[str, Sequence[str]] = {f"base-{model}": [*COMMON, *more] for model, more in MODELS.items()}
    for model, schedule in CASES:
        flags[f"{schedule}-{model}"] = [*COMMON, *MODELS[model], *(SCHEDULES | INTERLEAVED)[schedule]]
    flags["one-token"] = ONE_TOKEN
    return Trainings(2, flags, tmp_path_factory.mktemp("multi_token"))


@pytest.mark.parametrize(
    ("model", "schedule"),
    [pytest.param(*case, marks=() if case in IN_MAKE_TEST else pytest.mark.exhaustive) for case in CASES],
)
def test_numerics_equal_megatron_core(trainings: Trainings, model: str, schedule: str) -> None:
    trainings.run(f"{schedule}-{model}", f"base-{model}")
    assert trainings.numerics(f"{schedule}-{model}") == trainings.numerics(f"base-{model}")


def test_further_tokens_change_the_gradients(trainings: Trainings) -> None:
    with_them, without = (
        [json.loads(line)["grad_norm"] for line in trainings.numerics(name).decode().splitlines()]
        for name in ("base-tied", "one-token")
    )
    assert with_them != without


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        pytest.param(*case, marks=() if case == ("zb-h1", "tied") else pytest.mark.exhaustive)
        for case in product(SCHEDULES, ("untied", "tied"))
    ],
)
def test_their_losses_are_logged_as_megatron_lm_does(trainings: Trainings, model: str, schedule: str) -> None:
    def losses(name: str) -> list[tuple[str, str]]:
        return re.findall(r"\| (mtp_\d loss|lm loss): (\S+) \|", trainings.printed(name).replace("|", "||"))

    expected = losses(f"base-{model}")
    assert [name for name, _ in expected] == ["lm loss", "mtp_1 loss", "mtp_2 loss"] * 4
    assert losses(f"{schedule}-{model}") == expected
    # At first the loss of random tokens from a vocabulary of 120 is ln(120).
    assert all(float(loss) == pytest.approx(4.8, abs=0.3) for _, loss in expected)


def test_w_of_an_output_layer_that_is_used_several_times_is_deferred_too(trainings: Trainings) -> None:
    assert " > W is deferred for 100.0% of the weights" in trainings.printed("zb-h1-untied")
    assert " > W is deferred for 100.0% of the weights" not in trainings.printed("zb-h1-tied")


def test_where_it_is_tied_its_w_stays_in_b_and_the_start_says_so(trainings: Trainings) -> None:
    assert "output_layer (ColumnParallelLinear)" in trainings.printed("zb-h1-tied")
    assert "output_layer (ColumnParallelLinear)" not in trainings.printed("zb-h1-untied")


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("--mtp-num-layers", "0", "--mtp-num-layers must be at least 1, got 0"),
        ("--mtp-loss-scaling-factor", "-1", "--mtp-loss-scaling-factor must be at least 0, got -1.0"),
    ],
)
def test_a_mistake_is_one_line(name: str, value: str, line: str) -> None:
    """`test_bad_input.py` has the layout whose last stage lacks the layers."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked({name: value})
    assert str(error.value) == line


@pytest.mark.parametrize("model", ["tied", pytest.param("untied", marks=pytest.mark.exhaustive)])
def test_a_resumed_training_equals_an_uninterrupted_one(model: str, tmp_path: Path) -> None:
    """megatron-core refuses to save the unused weight that it gives to a tied output layer."""
    whole = [*COMMON, *MODELS[model], *SCHEDULES["zb-h1"], "--position-embedding-type", "rope"]
    folder = str(tmp_path / "checkpoints")
    first, second = [*whole, "--exit-interval", "2", "--save", folder], [*whole, "--load", folder]
    run_trainings(2, {"whole": whole, "first": first, "second": second}, tmp_path, unlogged=["first"])
    expected, resumed = ((tmp_path / f"{part}.jsonl").read_text().splitlines() for part in ("whole", "second"))
    assert len(expected) == 4
    assert resumed == expected[2:]


@pytest.mark.exhaustive  # `make test-megatron` runs it, for newer versions whose code differs
def test_the_losses_of_experts_are_collected_in_rehearsals_and_recomputed_blocks(tmp_path: Path) -> None:
    """The layers of further tokens have experts too, whose losses follow those of the model's own layers."""
    experts = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear")
    balanced = ("--moe-router-load-balancing-type", "aux_loss", "--zero-bubble-seed-by-layer", "--train-iters", "12")
    model = [*COMMON, *MODELS["untied"], *experts, *balanced]
    recomputing = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    runs = {
        "chosen": [*model, "--zero-bubble", "--zero-bubble-placement", "v"],  # never Megatron's split, so it rehearses
        "recomputed": [*model, *SCHEDULES["zb-h1"], *recomputing],
        "kept": [*model, *SCHEDULES["zb-h1"]],
    }
    printed = run_trainings(2, runs, tmp_path, unlogged=["chosen"])
    assert "rehearsed" in printed["chosen"]
    recomputed, kept = ((tmp_path / f"{part}.jsonl").read_text().splitlines() for part in ("recomputed", "kept"))
    assert len(kept) == 12
    assert recomputed == kept
