"""Hybrid models in the trainer: the numbers do not depend on the schedule, nor on where the layers are.

`make test` compares one schedule, a V and a chosen layout, and models with Mamba. Exhaustive are further schedules,
parallelism and precision. Some layers and multi-token prediction need a newer megatron-core than 0.16.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.zero_bubble.mcore.hybrid_spec import HAS_FURTHER, local_layers
from tests.launch import TINY_GPT
from tests.trainings import Trainings, run_trainings

COMMON = (
    *TINY_GPT[2:],
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "4", "--clip-grad", "0.5"),
)
DIVIDED = (*COMMON, "--hybrid-layer-pattern", "*-*-|--*", "--hidden-dropout", "0.1")
EXPERTS = (*COMMON, "--hybrid-override-pattern", "*E-*E-", "--num-experts", "4", "--moe-aux-loss-coeff", "1e-2")
EXPERTS = (*EXPERTS, "--moe-router-load-balancing-type", "aux_loss", "--disable-bias-linear")
SIZES = ["--mamba-state-dim", "16", "--mamba-head-dim", "8", "--mamba-num-groups", "2"]
MAMBA = (*COMMON, "--hybrid-layer-pattern", "M-*M|M-", "--hidden-dropout", "0.1", *SIZES)
DELTA = ("--linear-key-head-dim", "8", "--linear-value-head-dim", "8")
DELTA = (*DELTA, "--linear-num-key-heads", "2", "--linear-num-value-heads", "4")
ROTATED = (*COMMON, "--position-embedding-type", "rope")
FURTHER = (*ROTATED, "--hybrid-layer-pattern", "*-G-|-*M/*-/*-", "--swiglu", *DELTA, *SIZES)
LATENT_SIZES = ("--q-lora-rank", "24", "--kv-lora-rank", "16", "--qk-head-dim", "8", "--v-head-dim", "12")
LATENT_SIZES = (*LATENT_SIZES, "--qk-pos-emb-head-dim", "4")
LATENT = (*ROTATED, "--hybrid-layer-pattern", "+-M|+-", "--multi-latent-attention", *LATENT_SIZES, *SIZES)
NO_LAYER = "hybrid models of this megatron-core have no such layer"
LATER = pytest.mark.skipif(not HAS_FURTHER, reason=NO_LAYER)
HAS_LATENT = "+" in local_layers()
BY_LAYER = ("--zero-bubble-seed-by-layer", "--clip-grad", "0")
MAMBA_ANYWHERE = (*MAMBA, "--hybrid-layer-pattern", "M-*M-M--")
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
        "base, Mamba": MAMBA,
        "zb-2p, Mamba": (*MAMBA, "--zero-bubble-schedule", "zb-2p"),
        "post-validation, Mamba": (*MAMBA, "--zero-bubble-schedule", "zb-2p", "--zero-bubble-post-validation"),
        "base, Mamba anywhere": (*MAMBA_ANYWHERE, *BY_LAYER),
        "zb-v, Mamba": (*MAMBA_ANYWHERE, *BY_LAYER, "--zero-bubble-schedule", "zb-v"),
        "chosen, Mamba": (*MAMBA_ANYWHERE, *BY_LAYER, "--zero-bubble", "--zero-bubble-vocabulary-parallel", "off"),
        "base, further": FURTHER,
        "zb-h1, further": (*FURTHER, "--zero-bubble-schedule", "zb-h1"),
        "base, latent": LATENT,
        "zb-h1, latent": (*LATENT, "--zero-bubble-schedule", "zb-h1"),
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
        "base, no dropout": (*ANYWHERE, "--hidden-dropout", "0"),
        "chosen, no dropout": (
            *(*ANYWHERE, "--hidden-dropout", "0"),
            *("--zero-bubble", "--zero-bubble-vocabulary-parallel", "off"),
        ),
        "shards": (*ANYWHERE, "--zero-bubble-schedule", "zb-h1", "--zero-bubble-vocabulary-parallel"),
    }
    return Trainings(2, flags, tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize(
    ("training", "base"),
    [
        ("zb-2p", "base"),
        ("zb-h1, experts", "base, experts"),
        ("zb-2p, Mamba", "base, Mamba"),
        pytest.param("zb-h1, further", "base, further", marks=LATER),
        pytest.param("zb-h1, latent", "base, latent", marks=pytest.mark.skipif(not HAS_LATENT, reason=NO_LAYER)),
        pytest.param("post-validation, Mamba", "base, Mamba", marks=pytest.mark.exhaustive),
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
    ("training", "base"),
    [
        ("zb-v", "base, anywhere"),
        ("chosen", "base, anywhere"),
        ("chosen, no dropout", "base, no dropout"),
        ("zb-v, Mamba", "base, Mamba anywhere"),
        pytest.param("chosen, Mamba", "base, Mamba anywhere", marks=pytest.mark.exhaustive),
        pytest.param("interleaved-zb", "base, anywhere", marks=pytest.mark.exhaustive),
        pytest.param("base, uneven", "base, anywhere", marks=pytest.mark.exhaustive),
    ],
)
def test_the_losses_do_not_depend_on_the_layout(trainings: Trainings, training: str, base: str) -> None:
    assert losses(trainings, training) == losses(trainings, base)


def test_a_chosen_layout_is_a_pattern(trainings: Trainings) -> None:
    trainings.run("chosen")
    [pattern] = re.findall(r"--hybrid-layer-pattern '(\S+)'", trainings.printed("chosen"))
    assert pattern.replace("|", "") == "*-*--*-*"
    assert "|" in pattern
    assert " > W is deferred for 100.0% of the weights" in trainings.printed("chosen")
    table = trainings.printed("chosen").split("layers of each stage")[1]
    [stages] = re.findall(r"^     chosen: .*?  +([*-].*?)  +\d", table, re.MULTILINE)
    assert stages == pattern.replace("|", " | ")


def test_a_vocabulary_in_shards_gives_the_same_losses_but_for_rounding(trainings: Trainings) -> None:
    ours, base = (list(map(float.fromhex, losses(trainings, name))) for name in ("shards", "base, anywhere"))
    assert ours == pytest.approx(base, rel=1e-5)
    assert trainings.numerics("shards") != trainings.numerics("base, anywhere")


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        pytest.param(MAMBA, "zb-2p", id="Mamba"),
        pytest.param(FURTHER, "zb-2p", id="delta nets and further tokens", marks=LATER),
        pytest.param(
            FURTHER, None, id="the same under megatron-core's schedule", marks=(LATER, pytest.mark.exhaustive)
        ),
    ],
)
def test_a_resumed_training_equals_an_uninterrupted_one(
    model: Sequence[str], schedule: str | None, tmp_path: Path
) -> None:
    whole = [*model, "--lr-decay-style", "cosine"]
    whole += [] if schedule is None else ["--zero-bubble-schedule", schedule]
    folder = str(tmp_path / "checkpoints")
    first, second = [*whole, "--exit-interval", "2", "--save", folder], [*whole, "--load", folder]
    run_trainings(2, {"whole": whole, "first": first, "second": second}, tmp_path, unlogged=["first"])
    expected, resumed = ((tmp_path / f"{part}.jsonl").read_text().splitlines() for part in ("whole", "second"))
    assert len(expected) == 4
    assert resumed == expected[2:]
