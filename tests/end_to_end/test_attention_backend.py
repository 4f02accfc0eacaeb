"""Trainings with torch's attention: all schedules agree byte for byte, and with local attention within rounding."""

from __future__ import annotations

import json

import pytest

from tests.launch import TINY_GPT
from tests.trainings import Trainings

COMMON = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", "4"]
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]
TORCH = ["--attention-backend", "fused"]
CONTEXT = ["--context-parallel-size", "2"]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    flags = {
        "local": [*COMMON, *NO_DROPOUT],
        "torch": [*COMMON, *NO_DROPOUT, *TORCH],
        "torch-cp2": [*COMMON, *NO_DROPOUT, *TORCH, *CONTEXT],
        "base": [*COMMON, *TORCH, "--recompute-granularity", "selective"],
        "zb-h1": [*COMMON, *TORCH, "--recompute-granularity", "selective", "--zero-bubble-schedule", "zb-h1"],
    }
    return Trainings(4, flags, tmp_path_factory.mktemp("attention"))


def test_every_schedule_equals_megatron_cores(trainings: Trainings) -> None:
    assert trainings.numerics("zb-h1") == trainings.numerics("base")


@pytest.mark.exhaustive  # tests/mcore/test_attention.py compares the two attentions layer by layer
@pytest.mark.parametrize("name", ["torch", "torch-cp2"])
def test_losses_and_norms_are_those_of_local_attention_within_rounding(trainings: Trainings, name: str) -> None:
    local, ours = ([json.loads(line) for line in trainings.numerics(kind).splitlines()] for kind in ("local", name))
    for key in ("lm_loss", "grad_norm"):
        expected = [float.fromhex(line[key]) for line in local]
        assert [float.fromhex(line[key]) for line in ours] == pytest.approx(expected, rel=1e-4)
    assert ours != local, "other kernels round otherwise"
