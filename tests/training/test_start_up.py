"""A mistake that every rank finds is told once, one that only some rank finds too."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megatron.zero_bubble.training.start_up import report
from tests.launch import environment

SLOW_TO_END = """
import atexit, sys, time
from megatron.zero_bubble.training.start_up import report
atexit.register(time.sleep, 60)
sys.stdout.write("said before")
sys.exit(report("pretrain_gpt.py", ValueError("--lr is missing")))
"""


def test_rank_0_of_several_tells_and_is_gone_whatever_its_interpreter_has_to_clear_up():
    """The others wait for torchrun to see it end."""
    of_two = environment() | {"RANK": "0", "WORLD_SIZE": "2"}
    result = subprocess.run(
        [sys.executable, "-c", SLOW_TO_END], env=of_two, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 2
    assert result.stderr == "pretrain_gpt.py: error: --lr is missing\n"
    assert result.stdout == "said before"


def test_another_rank_tells_when_rank_0_had_its_time(monkeypatch, capsys):
    """SIGTERM, which ends it until then, does so although a trainer had taken it for a request to save."""
    waited = []

    def sleep(seconds: float) -> None:
        assert capsys.readouterr().err == ""
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        waited.append(seconds)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(time, "sleep", sleep)
    before = signal.signal(signal.SIGTERM, lambda *unused: None)
    try:
        assert report("pretrain_gpt.py", ValueError("--data-path: not here")) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "pretrain_gpt.py: error: --data-path: not here\n"
    assert waited == [pytest.approx(15.0)]


def test_a_rank_alone_ends_in_order(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert report("pretrain_gpt.py", ValueError("--lr is missing")) == 2
    assert capsys.readouterr().err == "pretrain_gpt.py: error: --lr is missing\n"
