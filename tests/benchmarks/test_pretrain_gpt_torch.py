"""torch.distributed.pipelining's schedules, measured against ours, train the same model on the same data.

The comparison runs in `make test-all`: the peer is a yardstick, and no part of the package.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.torch_training import train
from tests.launch import ROOT, TINY_GPT, run

PROGRAM = ("-m", "benchmarks.pretrain_gpt_torch")
FLAGS = [
    *TINY_GPT,
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "3"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--num-virtual-stages-per-pipeline-rank", "2"),
]


def read(path: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every iteration."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(float.fromhex(line["lm_loss"]), float.fromhex(line["grad_norm"])) for line in lines]


@pytest.mark.exhaustive
def test_split_backwards_give_megatron_cores_losses_and_gradients(tmp_path):
    megatrons, torchs = tmp_path / "megatron.jsonl", tmp_path / "torch.jsonl"
    result = run(2, ROOT / "pretrain_gpt.py", *FLAGS, "--log-numerics", str(megatrons))
    assert result.returncode == 0, result.stderr[-3000:]
    result = run(
        2, "-m", "benchmarks.pretrain_gpt_torch", "InterleavedZeroBubble", *FLAGS, "--log-numerics", str(torchs)
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "torch.distributed.pipelining's InterleavedZeroBubble" in result.stdout
    expected = read(megatrons)
    assert len(expected) == 3
    assert read(torchs) == [pytest.approx(pair, rel=1e-5) for pair in expected]


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("ZB", [], "must name a schedule: one of "),
        ("1F1B", [], "is not for 2 model chunks a rank"),
        ("ZBVZeroBubble", ["--calculate-per-token-loss"], "no --calculate-per-token-loss"),
        ("ZBVZeroBubble", ["--reset-attention-mask"], "no --reset-attention-mask"),
        ("ZBVZeroBubble", ["--mtp-num-layers", "1"], "no --mtp-num-layers"),
        ("ZBVZeroBubble", ["--global-batch-size", "8"], "with pipeline parallelism alone"),
    ],
)
def test_what_these_schedules_cannot_run_is_refused_before_anything_starts(monkeypatch, name, flags, words):
    monkeypatch.setenv("WORLD_SIZE", "4" if "alone" in words else "2")
    with pytest.raises(ValueError, match=words):
        train(name, [*FLAGS, *flags], "pretrain_gpt_torch.py")
