"""Starts programs on real ranks by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRETRAIN = ROOT / "pretrain_gpt.py"

TINY_GPT = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--lr", "1e-2", "--mock-data", "--vocab-size", "120"),
    *("--train-iters", "10", "--log-interval", "1"),
]
"""A model small enough that start-up is most of a run."""


def torchrun(num_ranks: int, script: str | Path, *flags: str) -> list[str]:
    """The command line that starts `script` on `num_ranks` processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launcher, str(script), *flags]


def environment() -> dict[str, str]:
    """One thread a rank: the ranks share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(num_ranks: int, script: str | Path, *flags: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr are captured."""
    command = torchrun(num_ranks, script, *flags)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)
