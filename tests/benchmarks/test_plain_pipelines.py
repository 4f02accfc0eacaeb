"""The comparison of pipelines of plain layers runs, and all find the losses of one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.launch import ROOT, environment


@pytest.mark.exhaustive  # half a minute of real compute
def test_all_pipelines_train_alike():
    command = [sys.executable, "-m", "benchmarks.plain_pipelines", "--model", "convolution", "--schedule", "zb-v"]
    sizes = ["--rounds", "3", "--steps", "1", "--json"]
    job = subprocess.run(
        [*command, *sizes], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert job.returncode == 0, job.stderr
    (document,) = json.loads(job.stdout)
    names = {name for name in document["seconds"] if not name.startswith("DeepSpeed")}
    assert names == {
        *("one process", "Pipeline, zb-v", "Pipeline, zb-v, post-validation"),
        *("torch 1F1B", "torch ZBVZeroBubble"),
    }
    assert all(len(rounds) == 3 and min(rounds) > 0 for rounds in document["seconds"].values())
