"""An emulation that Ctrl-C ends leaves no rank behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import forkserver

import psutil
import pytest
import torch

from benchmarks.emulation.ranks import run_job
from benchmarks.emulation.worker import EmulatedJob
from tests.launch import ROOT


@pytest.mark.exhaustive  # the endings of the trainer and of the launcher are in make test
def test_ctrl_c_ends_all_ranks_without_a_word(tmp_path):
    errors = tmp_path / "errors"
    flags = ("--pipeline-size", "2", "--num-microbatches", "4", "--schedule", "zb-h1", "--steps", "1000")
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.emulate", *flags],
            cwd=ROOT,
            stderr=file,
            start_new_session=True,
            # A shell starts what runs in its background deaf to Ctrl-C, these tests perhaps among it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    emulation = psutil.Process(process.pid)
    while process.poll() is None and sum("forkserver" in command_line(child) for child in children(emulation)) < 3:
        time.sleep(0.1)
    begun = children(emulation)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 130
    _, living = psutil.wait_procs(begun, timeout=120)
    assert not [command_line(child) for child in living if child.status() != psutil.STATUS_ZOMBIE]
    assert "Traceback" not in errors.read_text()


@pytest.fixture
def heeds_ctrl_c():
    """A process that a shell starts in its background ignores Ctrl-C, these tests perhaps among it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_while_the_ranks_start_waits_until_all_are_known(monkeypatch):
    """The emulation could not end a rank that it does not know yet."""
    known = []

    def start_processes(*_, **__):
        signal.raise_signal(signal.SIGINT)
        known.append(True)

    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(torch.multiprocessing, "start_processes", start_processes)
    job = EmulatedJob(2, (), steps=1, activation_bytes=16, timeout=timedelta(seconds=60))
    with pytest.raises(KeyboardInterrupt):
        run_job(job)
    assert known


def command_line(process: psutil.Process) -> str:
    """What the system says of a process, which may have ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return []
