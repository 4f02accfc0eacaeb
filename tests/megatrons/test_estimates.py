"""`zero-bubble estimate` counts the same model alike with every version of megatron-core."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.megatrons.megatron_trainings import needs_trainer

pytestmark = needs_trainer

JOB = (
    *("--pipeline-model-parallel-size", "2", "--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "8"),
    *("--seq-length", "256", "--micro-batch-size", "1", "--global-batch-size", "8", "--mock-data"),
    *("--vocab-size", "1000", "--train-iters", "10", "--lr", "1e-3", "--position-embedding-type", "rope"),
)
COUNTED = {"": 1.087, "--num-experts 4 --disable-bias-linear": 1.108, "--multi-latent-attention": 1.083}
"""Further flags of the job -> predicted speed of zb-h1 relative to 1F1B, as counted with megatron-core 0.16.1."""


@pytest.mark.parametrize("flags", COUNTED)
def test_a_model_is_counted(flags: str) -> None:
    command = (
        *("estimate", "--world-size", "2", "--device-memory", "80GiB", "--json"),
        *("--schedule", "1f1b", "--schedule", "zb-h1", "--"),
        *JOB,
    )
    job = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron.zero_bubble.cli", *command, *flags.split()],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert job.returncode == 0, job.stderr[-2000:]
    document = json.loads(job.stdout)
    [ratio] = [row["ratio_to_1f1b"] for row in document["schedules"] if row["schedule"] == "zb-h1"]
    assert ratio == pytest.approx(COUNTED[flags], abs=6e-4)
