"""A mistake that every rank finds is told once, one that only some rank finds too."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.zero_bubble.session import start_up
from megatron.zero_bubble.session.start_up import report, run_program
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


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_a_wrong_number_of_a_rank_does_not_hide_the_line(variable: str) -> None:
    wrong = environment() | {variable: "abc"}
    told = [sys.executable, "-c", SLOW_TO_END.replace("60", "0")]
    result = subprocess.run(told, env=wrong, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 2
    assert result.stderr == "pretrain_gpt.py: error: --lr is missing\n"


def test_the_line_is_printed_and_the_rank_ends_if_standard_output_is_closed() -> None:
    closing = SLOW_TO_END.replace('sys.stdout.write("said before")', "sys.stdout = None")
    of_two = environment() | {"RANK": "0", "WORLD_SIZE": "2"}
    told = [sys.executable, "-c", closing]
    result = subprocess.run(told, env=of_two, capture_output=True, text=True, timeout=50, check=False)
    assert result.returncode == 2
    assert result.stderr == "pretrain_gpt.py: error: --lr is missing\n"


def test_a_path_that_the_locale_cannot_encode_is_printed_escaped() -> None:
    naming = (
        "from megatron.zero_bubble.session.start_up import run_program; run_program('x', lambda: print('ck\\udce9'))"
    )
    strict = environment() | {"PYTHONIOENCODING": "utf-8:strict"}
    told = [sys.executable, "-c", naming]
    result = subprocess.run(told, env=strict, capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout == "ck\\udce9\n"


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


@pytest.mark.parametrize("error", [KeyError("a key"), CheckpointException("saving fails", {1: (OSError("full"), [])})])
def test_torchrun_finds_the_traceback_of_another_error(error: BaseException, monkeypatch, tmp_path: Path):
    """Also of torch's errors that are not an `Exception`."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(signal, "alarm", mock.Mock())
    with pytest.raises(type(error)):
        run_program("pretrain_gpt.py", mock.Mock(side_effect=error))
    assert type(error).__name__ in (tmp_path / "error.json").read_text()


def test_the_line_is_printed_on_a_full_disk(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    assert report("pretrain_gpt.py", ValueError("--lr is missing")) == 2
    assert capsys.readouterr().err == "pretrain_gpt.py: error: --lr is missing\n"


LEAVES_WORKERS = """
import json, multiprocessing, os, signal, sys, tempfile, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from megatron.zero_bubble.runtime.copy_lane import HostMemoryError
from megatron.zero_bubble.session import start_up
from megatron.zero_bubble.session.start_up import run_program

def work(queue):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    queue.put("ready")
    time.sleep(600)

def fail(error):
    raise error

class Deadly:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        os._exit(3)

def lose_rank():
    # Rank 1 ends while rank 0 waits for its message.
    file = tempfile.mktemp()
    rank = int(os.fork() == 0)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    if rank == 1:
        os._exit(7)
    dist.recv(torch.zeros(1), src=1)

def lose_rank_in_dataset():
    # megatron-core wraps the errors of mock datasets.
    try:
        lose_rank()
    except RuntimeError as error:
        raise Exception("a dataset failed to build") from error

ENDS = {
    "done": lambda: None,
    "error": lambda: fail(RuntimeError("an error")),
    "mistake": lambda: fail(ValueError("a mistake")),
    "lost loader": lambda: list(DataLoader(Deadly(), num_workers=1)),
    "lost rank": lose_rank,
    "lost rank in a dataset": lose_rank_in_dataset,
    "no host memory": lambda: fail(HostMemoryError("no room")),
    "exit": lambda: sys.exit(3),
    "SIGINT": lambda: signal.raise_signal(signal.SIGINT),
    "SIGKILL": lambda: signal.raise_signal(signal.SIGKILL),
}

# Otherwise the kernel ends a program that takes longer for its exit, as it may on a busy machine.
start_up._SECONDS_TO_END = 150
start_up._SECONDS_FOR_RANK_0 = 0.1

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
def told_and_ends() -> tuple[str, dict[str, list]]:
    """The lines of all programs, the status with which each has ended, and whether its worker outlived it by 30 s.

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
    return result.stderr, dict(map(json.loads, result.stdout.splitlines()))


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("done", 0),
        ("error", 1),
        ("mistake", 2),
        ("lost loader", 2),
        ("lost rank", 1),
        ("no host memory", 2),
        ("exit", 3),
        ("SIGINT", -signal.SIGINT),
        ("SIGKILL", -signal.SIGKILL),
    ],
)
def test_a_worker_that_ignores_sigterm_ends_with_its_program(told_and_ends, end: str, status: int):
    """Without help Python would wait for the worker at its exit, and a killed program would leave it behind."""
    assert told_and_ends[1][end] == [status, False]


def test_the_end_of_another_process_is_one_line(told_and_ends):
    """A program prints a traceback only for an error of its own."""
    told = told_and_ends[0]
    assert told.count("Traceback (most recent call last)") == 1
    assert "RuntimeError: an error" in told
    # Programs write at the same time, so that a line may follow another one without a line break between them.
    assert re.search(
        r"program: error: DataLoader worker \(pid.*\) exited unexpectedly.*; if the system's log says", told
    )
    assert told.count("program: error: rank 0 has lost another rank, whose error message, if any") == 2


def test_a_warning_of_each_split_of_a_dataset_is_shown_once(caplog):
    start_up.quiet_start_up()
    of_datasets = logging.getLogger("megatron.core.datasets.gpt_dataset")
    try:
        for name in ("Mock", "Mock", "GPT", "Mock"):
            of_datasets.warning(f"Unable to save {name}Dataset indexes because path_to_cache is None")
    finally:
        of_datasets.filters.clear()
    assert [record.message[:19] for record in caplog.records] == ["Unable to save Mock", "Unable to save GPTD"]
