"""A mistake that every rank finds is told once, one that only some rank finds too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.zero_bubble.session.start_up import report
from tests.launch import environment

SLOW_TO_END = """
import atexit, sys, time
from megatron.zero_bubble.session.start_up import report
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


LEAVES_WORKERS = """
import json, multiprocessing, os, signal, sys, time
from megatron.zero_bubble.session import start_up
from megatron.zero_bubble.session.start_up import run_program

def work(queue):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    queue.put("ready")
    time.sleep(600)

def fail(error):
    raise error

ENDS = {
    "done": lambda: None,
    "error": lambda: fail(RuntimeError("an error")),
    "mistake": lambda: fail(ValueError("a mistake")),
    "exit": lambda: sys.exit(3),
    "SIGINT": lambda: signal.raise_signal(signal.SIGINT),
    "SIGKILL": lambda: signal.raise_signal(signal.SIGKILL),
}

# Otherwise the kernel ends a program that takes longer for its exit, as it may on a busy machine.
start_up._SECONDS_TO_END = 40

def body(end, pipe):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    worker = context.Process(target=work, args=(queue,), daemon=True)
    worker.start()
    queue.get()
    os.write(pipe, str(worker.pid).encode())
    end()

def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

programs = {}
for name, end in ENDS.items():
    mine, its = os.pipe()
    program = os.fork()
    if program == 0:
        sys.exit(run_program("program", lambda: body(end, its)))
    programs[program] = name, mine
for _ in ENDS:
    program, status = os.wait()
    name, pipe = programs[program]
    deadline, worker = time.monotonic() + 30.0, int(os.read(pipe, 20))
    while is_there(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    print(json.dumps([name, [os.waitstatus_to_exitcode(status), is_there(worker)]]), flush=True)
"""


@pytest.fixture(scope="module")
def ends() -> dict[str, list]:
    """The status with which each program has ended, and whether its worker was still there 30 s later.

    All are forks of one process, which imports what they need.
    """
    result = subprocess.run(
        [sys.executable, "-c", LEAVES_WORKERS],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(map(json.loads, result.stdout.splitlines()))


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("done", 0),
        ("error", 1),
        ("mistake", 2),
        ("exit", 3),
        ("SIGINT", -signal.SIGINT),
        ("SIGKILL", -signal.SIGKILL),
    ],
)
def test_a_worker_that_ignores_sigterm_ends_with_its_program(ends: dict[str, list], end: str, status: int):
    """Without help Python would wait for the worker at its exit, and a killed program would leave it behind."""
    assert ends[end] == [status, False]
