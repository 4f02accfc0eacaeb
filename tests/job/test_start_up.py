"""A mistake that every rank finds is told once, one that only some rank finds too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.zero_bubble.job.start_up import report
from tests.launch import environment

SLOW_TO_END = """
import atexit, sys, time
from megatron.zero_bubble.job.start_up import report
atexit.register(time.sleep, 60)
sys.stdout.write("said before")
sys.exit(report("pretrain_gpt.py", ValueError("--lr is missing")))
"""


def test_rank_0_of_several_tells_and_is_gone_whatever_its_interpreter_has_to_clear_up():
    """Rank 0 ends at once, because the other ranks wait until torchrun sees it end."""
    of_two = environment() | {"RANK": "0", "WORLD_SIZE": "2"}
    result = subprocess.run(
        [sys.executable, "-c", SLOW_TO_END], env=of_two, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 2
    assert result.stderr == "pretrain_gpt.py: error: --lr is missing\n"
    assert result.stdout == "said before"


def test_another_rank_tells_when_rank_0_had_its_time(monkeypatch, capsys):
    """While it waits SIGTERM ends it, even where a trainer had made SIGTERM a request to save."""
    waited = []

    def sleep(seconds: float) -> None:
        assert capsys.readouterr().err == ""
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        waited.append(seconds)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.signal(signal.SIGTERM, lambda *unused: None)
    try:
        with pytest.raises(SystemExit, match="2"):
            report("pretrain_gpt.py", ValueError("--data-path: not here"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "pretrain_gpt.py: error: --data-path: not here\n"
    assert waited == [pytest.approx(5.0)]


def test_a_rank_alone_ends_in_order(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert report("pretrain_gpt.py", ValueError("--lr is missing")) == 2
    assert capsys.readouterr().err == "pretrain_gpt.py: error: --lr is missing\n"


def test_torchrun_finds_the_line(monkeypatch, tmp_path: Path, capsys):
    """The line is in the file that torchrun reads, in the form that it prints, dated before the other ranks' ends."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    now = int(time.time())
    assert report("pretrain_gpt.py", ValueError("--lr is missing")) == 2
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(file))
    assert failure.message["extraInfo"]["py_callstack"] == "pretrain_gpt.py: error: --lr is missing"
    assert failure.timestamp < now


LEAVES_A_WORKER = """
import multiprocessing, signal, sys, time
from megatron.zero_bubble.job.start_up import run_program

def work(queue):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    queue.put("ready")
    time.sleep(600)

def body():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    worker = context.Process(target=work, args=(queue,), daemon=True)
    worker.start()
    queue.get()
    print(worker.pid, flush=True)
    {end}

sys.exit(run_program("program", body))
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("return", 0),
        ("raise RuntimeError('an error')", 1),
        # As the program's own end or an error does, these pass through `run_program` once the worker is there.
        pytest.param("raise ValueError('a mistake')", 2, marks=pytest.mark.exhaustive),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.exhaustive),
        pytest.param("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, marks=pytest.mark.exhaustive),
        ("signal.raise_signal(signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_worker_that_ignores_sigterm_ends_with_its_program(end: str, status: int):
    """Without help Python would wait for the worker at its exit, and a killed program would leave it behind."""
    script = LEAVES_A_WORKER.format(end=end)
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == status, result.stderr
    deadline = time.monotonic() + 5.0
    while psutil.pid_exists(int(result.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
