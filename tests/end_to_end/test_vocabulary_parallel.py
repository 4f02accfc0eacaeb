"""Trainings whose vocabulary is spread over all ranks: what they compute, print, save and refuse."""

from __future__ import annotations

import json

import pytest

from tests.launch import TINY_GPT
from tests.trainings import Trainings

FLAGS = [
    *TINY_GPT,
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", "8"),
    # Weights and dropout are then the same in every placement.
    "--zero-bubble-seed-by-layer",
]
SPREAD = "--zero-bubble-vocabulary-parallel"
SCHEDULES = ("1f1b", "zb-h1", "zb-2p")


def numerics(runs: Trainings, name: str) -> list[dict[str, float]]:
    lines = runs.numerics(name).decode().splitlines()
    return [{key: float.fromhex(json.loads(line)[key]) for key in ("lm_loss", "grad_norm")} for line in lines]


def schedule(name: str) -> list[str]:
    more = ["--num-virtual-stages-per-pipeline-rank", "2"] if name.startswith("interleaved") else []
    return ["--zero-bubble-schedule", name, *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("vocabulary")
    untied = ["--untie-embeddings-and-output-weights"]
    save = ["--save", str(folder / "checkpoints"), "--save-interval", "4"]
    trainings = {
        "megatron": FLAGS,
        **{name: [*FLAGS, *schedule(name), SPREAD] for name in SCHEDULES},
        "interleaved-zb": [*FLAGS, *schedule("interleaved-zb"), SPREAD],
        "v": [*FLAGS, *schedule("zb-v"), SPREAD, *save],
        "megatron untied": [*FLAGS, *untied],
        "untied": [*FLAGS, *untied, *schedule("zb-h1"), SPREAD, "--zero-bubble-post-validation"],
        "chosen": [*FLAGS, "--zero-bubble", SPREAD, "--vocab-size", "4000"],
    }
    return Trainings(2, trainings, folder)


def assert_close(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("zb-h1", "megatron"),
        ("untied", "megatron untied"),
        # mcore/test_vocabulary_stage.py compares placements with several chunks in one step.
        pytest.param("interleaved-zb", "megatron", marks=pytest.mark.exhaustive),
        pytest.param("v", "megatron", marks=pytest.mark.exhaustive),
    ],
)
def test_losses_and_norms_are_megatron_cores_but_for_rounding(runs: Trainings, ours: str, theirs: str) -> None:
    runs.run(ours, theirs)
    assert_close(numerics(runs, ours), numerics(runs, theirs))


@pytest.mark.parametrize("name", SCHEDULES[1:])
def test_all_schedules_give_the_same_bits(runs: Trainings, name: str) -> None:
    runs.run(*SCHEDULES)
    assert runs.numerics(name) == runs.numerics(SCHEDULES[0])


def test_the_table_and_the_flags_to_repeat_a_layout_say_that_the_vocabulary_is_spread(runs: Trainings) -> None:
    printed = runs.printed("chosen")
    [chosen] = [line for line in printed.splitlines() if line.startswith("     chosen: ")]
    assert "vocabulary shards" in chosen
    [again] = [line for line in printed.splitlines() if line.startswith("     the same layout in another run: ")]
    assert f"{SPREAD} on" in again
    assert " > zero-bubble plan; times measured up to step 6" in printed
