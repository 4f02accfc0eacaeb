"""torch.distributed.pipelining's schedules, measured against ours, train the same model on the same data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import ROOT, TINY_GPT, run

SCRIPT = ROOT / "tools" / "pretrain_gpt_torch.py"
FLAGS = [
    *TINY_GPT,
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "3"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--num-virtual-stages-per-pipeline-rank", "2"),
]


def read(path: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every iteration."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(float.fromhex(line["lm_loss"]), float.fromhex(line["grad_norm"])) for line in lines]


def test_split_backwards_give_megatron_cores_losses_and_gradients(tmp_path):
    megatrons, torchs = tmp_path / "megatron.jsonl", tmp_path / "torch.jsonl"
    result = run(2, ROOT / "pretrain_gpt.py", *FLAGS, "--log-numerics", str(megatrons))
    assert result.returncode == 0, result.stderr[-3000:]
    result = run(2, SCRIPT, "InterleavedZeroBubble", *FLAGS, "--log-numerics", str(torchs))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "torch.distributed.pipelining's InterleavedZeroBubble" in result.stdout
    expected = read(megatrons)
    assert len(expected) == 3
    assert read(torchs) == [pytest.approx(pair, rel=1e-5) for pair in expected]
