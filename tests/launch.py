"""Starts real ranks: what the end-to-end tests share."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from megatron.zero_bubble.cli.check.corpus import write_corpus

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


def run_trainings(
    num_ranks: int, trainings: dict[str, Sequence[str]], folder: Path, unlogged: Collection[str] = ()
) -> dict[str, str]:
    """Run several trainings in one job, each with `--log-numerics folder/NAME.jsonl`: start-up is paid once.

    Those named in `unlogged` are without that flag: it gathers parameters. In place of `--mock-data` they read a
    small corpus, whose index they share. Returns what each printed.
    """
    write_corpus(folder / "corpus")
    data = ["--tokenizer-type", "NullTokenizer", "--train-data-path", str(folder / "corpus")]
    plan = {}
    for name, flags in trainings.items():
        given = [word for word in flags if word != "--mock-data"]
        plan[name] = [*given, *data]
        if name not in unlogged:
            plan[name] += ["--log-numerics", str(folder / f"{name}.jsonl")]
    (folder / "plan.json").write_text(json.dumps(plan))
    result = run(
        num_ranks, ROOT / "tests" / "several_trainings.py", str(folder / "plan.json"), timeout=300 + 10 * len(plan)
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    _, *parts = re.split(r"^training (.*)\n", result.stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))
