"""The promise of `--zero-bubble-post-validation`: the numbers of the step that waits for all ranks, bit for bit.

`make test` runs a case with each way to find that a step was wrong, in one start of two ranks. Exhaustive are the same
ways with other precisions, optimizers and layouts, and the proof that every case does what its name says.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.changes import InfiniteGradient, NoStepWaits
from tests.comparison import printed_losses
from tests.launch import TINY_GPT
from tests.trainings import Trainings, run_trainings

FP16 = ("--fp16", "--initial-loss-scale", "65536", "--hysteresis", "1", "--loss-scale-window", "4")
SOME_CLIPPED = ("--clip-grad", "1.3")
ALL_CLIPPED = ("--clip-grad", "0.3")
NONE_CLIPPED = ("--clip-grad", "1e6")
SGD = ("--optimizer", "sgd", "--lr", "0.1")
TRAIN_ON = "--no-check-for-nan-in-loss-and-grad"
UNTIED = ("--untie-embeddings-and-output-weights",)
SHARDED = ("--use-distributed-optimizer",)


def infs(*places: tuple[int, int]) -> tuple[InfiniteGradient, ...]:
    """Infinite gradients in these iterations, on these pipeline ranks."""
    return tuple(InfiniteGradient(iteration, rank) for iteration, rank in places)


TWO_RANKS = {
    "fp32, clipped now and then": (*SOME_CLIPPED, "--train-iters", "50"),
    "bf16, clipped always": ("--bf16", *ALL_CLIPPED),
    "bf16, an Inf without a loss scale": ("--bf16", *SOME_CLIPPED, *UNTIED, *infs((9, 1)), TRAIN_ON),
    "fp16, losses of experts, a scale that is too large at first": (
        *("--fp16", "--initial-loss-scale", str(2**26), "--hysteresis", "1", *UNTIED),
        *("--num-experts", "4", "--moe-aux-loss-coeff", "0.1", "--disable-bias-linear"),
    ),
    "fp32, never clipped": (*NONE_CLIPPED, *UNTIED),
    "fp32, SGD": ("--clip-grad", "0.71", *SGD),
    "bf16, SGD without momentum": ("--bf16", "--clip-grad", "0.91", *SGD, "--sgd-momentum", "0"),
    "fp16, Inf first, last, on each and on both": (
        *FP16,
        *SOME_CLIPPED,
        *infs((1, 0), (5, 1), (8, 0), (8, 1), (12, 1)),
    ),
}
FOUR_RANKS = {
    "fp32, clipped now and then": SOME_CLIPPED,
    "fp16, an Inf on each rank in turn": (
        *FP16,
        *SOME_CLIPPED,
        *infs((3, 0), (5, 1), (7, 2), (9, 3), (12, 0), (12, 2)),
    ),
    "a V, bf16, untied": (
        *("--zero-bubble-schedule", "zb-v", "--num-layers", "8", "--bf16", *SOME_CLIPPED, *UNTIED),
        *(*infs((11, 2)), TRAIN_ON),
        # Dropout follows the order of the two chunks' forwards, and that a plan made from measured times.
        *("--zero-bubble-profile-iters", "0", "0"),
    ),
}
REPLICAS = {
    "replicas, fp16": (*FP16, *SOME_CLIPPED, *infs((4, 1), (12, 0))),
    "distributed optimizer, fp16": (*FP16, *SOME_CLIPPED, *SHARDED, *infs((4, 1), (12, 0))),
    "distributed optimizer, fp32, all overlapped": (
        *(*SOME_CLIPPED, *SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "experts on two ranks": (
        *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-aux-loss-coeff", "0.01"),
        *("--disable-bias-linear", *SOME_CLIPPED),
    ),
}
"""Two pipeline ranks, and two replicas of each."""

INVERTED = "fp32, clipped now and then"
QUICK = (INVERTED, "fp16, Inf first, last, on each and on both")

LAYOUTS = {2: (2, TWO_RANKS), 4: (4, FOUR_RANKS), "2 x 2": (2, REPLICAS)}
CASES = [(layout, case) for layout, (_, cases) in LAYOUTS.items() for case in cases]


def flags(num_ranks: int, *more: str) -> list[str]:
    """Dropout is on, embeddings are tied unless a case says otherwise."""
    sizes = ["--pipeline-model-parallel-size", str(num_ranks), "--global-batch-size", "4", "--train-iters", "12"]
    return [*TINY_GPT, *sizes, "--zero-bubble-schedule", "zb-2p", *more]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Trainings]:
    """Trainings by layout: each case runs with the step at the end and twice with post-validation.

    In `CASE.waiting` steps wait while many steps are wrong, in `CASE.post` no step waits.
    """
    jobs: dict[object, Trainings] = {}
    for layout, (num_ranks, cases) in LAYOUTS.items():
        plan = {}
        for case, more in cases.items():
            plan[case] = flags(num_ranks, *more)
            plan[f"{case}.waiting"] = [*plan[case], "--zero-bubble-post-validation"]
            plan[f"{case}.post"] = [*plan[f"{case}.waiting"], NoStepWaits()]
        if layout == 2:
            plan["inverse"] = [*plan[f"{INVERTED}.post"], "--zero-bubble-rollback", "inverse"]
        jobs[layout] = Trainings(2 if layout == 2 else 4, plan, tmp_path_factory.mktemp("numerics"))
    return jobs


def quick(layout: object, case: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if layout == 2 and case in QUICK else (pytest.mark.exhaustive,)


def lines_of(numerics: bytes) -> list[dict]:
    return [json.loads(line) for line in numerics.splitlines()]


@pytest.mark.parametrize(
    ("layout", "case"),
    [pytest.param(*case, marks=quick(*case), id=f"{case[0]} ranks: {case[1]}") for case in CASES],
)
def test_the_numbers_are_those_of_a_step_that_waits(
    trainings: dict[object, Trainings], layout: object, case: str
) -> None:
    trainings[layout].run(case, f"{case}.post", f"{case}.waiting")
    assert trainings[layout].numerics(f"{case}.post") == trainings[layout].numerics(case)
    assert trainings[layout].numerics(f"{case}.waiting") == trainings[layout].numerics(case)


@pytest.mark.exhaustive
def test_the_cases_are_what_they_say(trainings: dict[object, Trainings]) -> None:
    """The cases clip in all, some and no iterations, and skip the steps in which an Inf was put, and no other."""

    def norms(case: str) -> list[float | None]:
        values = [line["grad_norm"] for line in lines_of(trainings[2].numerics(case))]
        return [None if value is None else float.fromhex(value) for value in values]

    some = norms("fp32, clipped now and then")
    assert len(some) == 50
    assert min(some) < 1.3 < max(some)
    assert min(norms("bf16, clipped always")) > 0.3
    skipped = [k for k, norm in enumerate(norms("fp16, Inf first, last, on each and on both"), 1) if norm is None]
    assert {1, 5, 8, 12} <= set(skipped)
    too_large = norms("fp16, losses of experts, a scale that is too large at first")
    assert None in too_large
    assert too_large[-1] is not None
    assert math.isinf(norms("bf16, an Inf without a loss scale")[8])


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("fp32, clipped now and then", [1]),
        pytest.param("fp32, SGD", [0, 1], marks=pytest.mark.exhaustive),
        pytest.param("bf16, SGD without momentum", [0, 1], marks=pytest.mark.exhaustive),
        ("fp16, Inf first, last, on each and on both", [0, 1]),
    ],
)
def test_the_cases_undo_steps(trainings: dict[object, Trainings], case: str, ranks: list[int]) -> None:
    """A step is only undone where a rank's own gradients did not show that it was wrong."""
    printed = trainings[2].printed(f"{case}.post")
    (counts,) = re.findall(r"^undone steps of each rank: \[(\d+), (\d+)\]$", printed, flags=re.MULTILINE)
    assert [rank for rank in range(2) if int(counts[rank]) > 0] == ranks


def test_the_inverse_is_close(trainings: dict[object, Trainings]) -> None:
    """Rolled back by inverting AdamW: 50 iterations, many of them amended, with losses within 1e-4."""
    exact, close = (lines_of(trainings[2].numerics(name)) for name in (INVERTED, "inverse"))
    assert len(close) == 50
    for a, b in zip(exact, close, strict=True):
        assert float.fromhex(b["lm_loss"]) == pytest.approx(float.fromhex(a["lm_loss"]), rel=1e-4)


@pytest.mark.exhaustive
def test_parameters_that_replicas_gather_during_the_validation_are_gathered_again(tmp_path: Path) -> None:
    """The shard's last bucket is in flight then. `--log-numerics` would gather the parameters once more."""
    overlapped = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "2000")
    shards = (*UNTIED, "--zero-bubble-vocabulary-parallel", "on")
    waits = flags(2, *overlapped, *shards, *ALL_CLIPPED, "--log-interval", "1")
    plan = {"waits": waits, "post": [*waits, "--zero-bubble-post-validation", NoStepWaits()]}
    printed = run_trainings(4, plan, tmp_path, unlogged=tuple(plan))
    losses = {name: printed_losses(printed[name]) for name in plan}
    assert len(losses["waits"]) == 12
    assert losses["post"] == losses["waits"]


@pytest.mark.exhaustive  # tests/launcher/test_launch.py compares such logs, too
def test_what_is_logged_is_settled(tmp_path: Path) -> None:
    """The norm belongs to its iteration; rollbacks are counted; evaluation and checkpoints see the right parameters."""
    more = ("--eval-interval", "4", "--eval-iters", "1", "--save-interval", "6", "--exit-signal-handler")
    common = [*flags(2, *ALL_CLIPPED), *more, "--valid-data-path", str(tmp_path / "corpus")]
    waits = [*common, "--save", str(tmp_path / "waits")]
    adaptive = [*common, "--save", str(tmp_path / "post"), "--zero-bubble-post-validation"]
    plan = {"waits": waits, "post": [*adaptive, NoStepWaits()], "adaptive": adaptive}
    printed = run_trainings(2, plan, tmp_path, unlogged=tuple(plan))
    words = ("iteration ", "lm loss", "grad norm", "learning rate", "consumed samples", "validation loss")

    def figures(output: str) -> list[str]:
        fields = [f.split("]")[-1].strip() for line in output.splitlines() for f in line.split("|")]
        return [field for field in fields if field.startswith(words)]

    assert figures(printed["adaptive"]) == figures(printed["post"]) == figures(printed["waits"])
    lines = [line for line in printed["post"].splitlines() if "lm loss:" in line]
    assert len(lines) == 12
    assert all(" rollbacks: 1 | redone forwards: " in line for line in lines)
    settled_by_evaluation = [line for line in lines if "redone forwards: 0 |" in line]
    assert [int(line.split("iteration")[1].split("/")[0]) for line in settled_by_evaluation] == [4, 6, 8, 12]
    assert "rollbacks" not in printed["waits"]
    lines = [line for line in printed["adaptive"].splitlines() if "lm loss:" in line]
    assert ["rollbacks: 1" in line for line in lines] == [True] * 2 + [False] * 10
    assert ["steps that waited: 1" in line for line in lines] == [False] * 2 + [True] * 10
