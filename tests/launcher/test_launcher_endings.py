"""However a job under the launcher ends, all of its processes are gone soon, with a status that tells how it went.

`make test` runs a signal; the other endings go the ways of `tests/training/test_endings.py`, through the
same code, and are in `make test-all`.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.launch import ROOT, torchrun

SECONDS = 60.0
"""Time for a job to be gone: see tests/training/test_endings.py."""
SCRIPT = ROOT / "tests" / "launcher" / "checkout" / "pretrain_small.py"
FOR_EVER = ("--train-iters", "1000000")
HANDLER = ("--exit-signal-handler",)
POST_VALIDATION = ("--zero-bubble-post-validation", "--log-interval", "1")
WAITING = pytest.param((), marks=pytest.mark.exhaustive, id="waiting")
WITH_AND_WITHOUT = pytest.mark.parametrize("more", [WAITING, pytest.param(POST_VALIDATION, id="post-validation")])


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    jobs: list[Job] = []

    def start_job(*more: str, script: Path = SCRIPT) -> Job:
        flags = ("--zero-bubble-cpu", "--zero-bubble", "--pipeline-model-parallel-size", "2", "--save", str(tmp_path))
        command = torchrun(2, "-m", "megatron.zero_bubble", str(script), *flags, *more)
        jobs.append(Job(command, tmp_path))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end(0.0)


@pytest.mark.exhaustive
@WITH_AND_WITHOUT
def test_a_script_that_is_done(start, more) -> None:
    job = start(*HANDLER, *more)
    job.wait_until(lambda: "validation loss" in job.output)
    assert job.end(SECONDS)[:2] == (0, []), job.errors


@pytest.mark.exhaustive
def test_an_error_in_the_script(start, tmp_path: Path) -> None:
    """The loader's workers end too, although the traceback keeps the loader and SIGTERM does not end them."""
    checkout = tmp_path / "checkout"
    shutil.copytree(SCRIPT.parent, checkout)
    fault = 'batch = next(data_iterator)\n        assert get_args().rank == 0, "a planted error"'
    script = checkout / SCRIPT.name
    script.write_text(SCRIPT.read_text().replace("batch = next(data_iterator)", fault))
    job = start(*HANDLER, *FOR_EVER, script=script)
    job.wait_until(lambda: "a planted error" in job.errors)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    assert "a planted error" in job.errors[job.errors.index("FAILED\n") :], "torchrun's summary"


@WITH_AND_WITHOUT
def test_a_signal_saves_where_the_script_does(start, tmp_path: Path, more) -> None:
    job = start(*HANDLER, *FOR_EVER, *more)
    job.wait_for_iteration(3)
    job.launcher.terminate()
    status, left, seconds = job.end(SECONDS)
    assert left == [], f"{left} after {seconds} s: {job.errors}"
    assert status == 1, "torchrun's own, when it is told to stop"
    assert "exiting program at iteration" in job.output
    assert (tmp_path / "rank_1.pt").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_a_rank_ends_the_job(start, tmp_path: Path, number: signal.Signals) -> None:
    job = start(*FOR_EVER)
    job.wait_for_iteration(3)
    job.ranks()[0].send_signal(number)
    status, left, seconds = job.end(SECONDS)
    assert left == [], f"{left} after {seconds} s: {job.errors}"
    assert status == 1
    assert f"Signal {number.value} ({number.name}) received" in job.errors
