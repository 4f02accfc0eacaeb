"""A user's mistake: one line that names the flag and the value, a non-zero exit, no traceback of ours, no hang."""

from __future__ import annotations

import re
from pathlib import Path

from tests.launch import PRETRAIN, TINY_GPT, run

BASE = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--zero-bubble"]
REAL_DATA = [flag for flag in BASE if flag != "--mock-data"]


def errors_of(*flags: str) -> list[str]:
    """The lines in which `pretrain_gpt.py` complains, having ended by itself with an error."""
    result = run(2, PRETRAIN, *flags, timeout=120)
    assert result.returncode != 0, result.stdout
    assert 'pretrain_gpt.py", line' not in result.stderr, "a traceback: " + result.stderr
    return re.findall(r"pretrain_gpt\.py: error: (.*)", result.stderr)


def test_an_unknown_schedule_is_answered_with_the_known_ones() -> None:
    (line,) = errors_of(*BASE, "--zero-bubble-schedule", "zb-h3")
    assert "--zero-bubble-schedule zb-h3" in line
    assert all(name in line for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"))


def test_missing_data(tmp_path: Path) -> None:
    (line,) = errors_of(*REAL_DATA, "--tokenizer-type", "NullTokenizer", "--data-path", str(tmp_path / "nothing"))
    assert "--data-path" in line
    assert str(tmp_path / "nothing") in line


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    (line,) = errors_of(*BASE, "--load", str(tmp_path))
    assert f"--load {tmp_path}" in line


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    saved = run(2, PRETRAIN, *BASE, "--train-iters", "1", "--save", str(tmp_path))
    assert saved.returncode == 0, saved.stderr
    (line,) = errors_of(*BASE, "--train-iters", "2", "--load", str(tmp_path))
    assert f"--load {tmp_path}" in line
    assert "--override-opt_param-scheduler" in line
    (line,) = errors_of(*BASE, "--hidden-size", "64", "--load", str(tmp_path))
    assert "--hidden-size 64" in line
    assert "32" in line
