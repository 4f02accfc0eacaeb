"""Hybrid models in the trainer: the numbers do not depend on the schedule, nor on where the layers are.

`make test` compares one schedule, a V and a chosen layout. Exhaustive are further schedules, parallelism and precision.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest

from tests.launch import TINY_GPT
from tests.trainings import Trainings

COMMON = (
    *TINY_GPT[2:],
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "4", "--clip-grad", "0.5"),
)
DIVIDED = (*COMMON, "--hybrid-layer-pattern", "*-*-|--*", "--hidden-dropout", "0.1")
EXPERTS = (*COMMON, "--hybrid-override-pattern", "*E-*E-", "--num-experts", "4", "--moe-aux-loss-coeff", "1e-2")
EXPERTS = (*EXPERTS, "--moe-router-load-balancing-type", "aux_loss", "--disable-bias-linear")
BY_LAYER = ("--zero-bubble-seed-by-layer", "--clip-grad", "0")
ANYWHERE = (*COMMON, "--hybrid-layer-pattern", "*-*--*-*", "--hidden-dropout", "0.1", *BY_LAYER)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Trainings on two ranks; those named `base ...` run megatron-core's own schedule."""
    flags: dict[str, Sequence[str]] = {
        "base": DIVIDED,
        "zb-2p": (*DIVIDED, "--zero-bubble-schedule", "zb-2p"),
        "post-validation": (*DIVIDED, "--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation"),
        "base, experts": EXPERTS,
        "zb-h1, experts": (*EXPERTS, "--zero-bubble-schedule", "zb-h1"),
        "base, bf16": (*DIVIDED, "--bf16", "--position-embedding-type", "rope"),
        "zb-h1, bf16": (*DIVIDED, "--bf16", "--position-embedding-type", "rope", "--zero-bubble-schedule", "zb-h1"),
        "base, anywhere": ANYWHERE,
        "base, uneven": (*ANYWHERE, "--hybrid-layer-pattern", "*-*--|*-*"),
        "zb-v": (*ANYWHERE, "--zero-bubble-schedule", "zb-v"),
        "interleaved-zb": (
            *ANYWHERE,
            "--hybrid-layer-pattern",
            "*|-*--|*-|*",
            "--zero-bubble-schedule",
            "interleaved-zb",
        ),
        "chosen": (*ANYWHERE, "--zero-bubble", "--zero-bubble-vocabulary-parallel", "off"),
        "shards": (*ANYWHERE, "--zero-bubble-schedule", "zb-h1", "--zero-bubble-vocabulary-parallel"),
    }
    return Trainings(2, flags, tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize(
    ("training", "base"),
    [
        ("zb-2p", "base"),
        ("zb-h1, experts", "base, experts"),
        pytest.param("post-validation", "base", marks=pytest.mark.exhaustive),
        pytest.param("zb-h1, bf16", "base, bf16", marks=pytest.mark.exhaustive),
    ],
)
def test_numerics_equal_megatron_core(trainings: Trainings, training: str, base: str) -> None:
    trainings.run(training, base)
    assert trainings.numerics(training) == trainings.numerics(base)


def losses(trainings: Trainings, name: str) -> list[str]:
    trainings.run(name)
    return [json.loads(line)["lm_loss"] for line in trainings.numerics(name).decode().splitlines()]


@pytest.mark.parametrize(
    "training",
    [
        "zb-v",
        "chosen",
        pytest.param("interleaved-zb", marks=pytest.mark.exhaustive),
        pytest.param("base, uneven", marks=pytest.mark.exhaustive),
    ],
)
def test_the_losses_do_not_depend_on_the_layout(trainings: Trainings, training: str) -> None:
    assert losses(trainings, training) == losses(trainings, "base, anywhere")


def test_a_chosen_layout_is_a_pattern(trainings: Trainings) -> None:
    trainings.run("chosen")
    [pattern] = re.findall(r"--hybrid-layer-pattern '(\S+)'", trainings.printed("chosen"))
    assert pattern.replace("|", "") == "*-*--*-*"
    assert "|" in pattern
    assert " > W is deferred for 100.0% of the weights" in trainings.printed("chosen")


def test_a_vocabulary_in_shards_gives_the_same_losses_but_for_rounding(trainings: Trainings) -> None:
    ours, base = (list(map(float.fromhex, losses(trainings, name))) for name in ("shards", "base, anywhere"))
    assert ours == pytest.approx(base, rel=1e-5)
    assert ours != base
