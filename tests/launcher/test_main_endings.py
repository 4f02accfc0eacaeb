"""However a job under the launcher ends, all of its processes are gone soon, with a status that tells how it went.

`make test` sends a signal to ranks that are there. The ways to end that `tests/end_to_end/test_endings.py` tests too,
through the same code, are exhaustive here, one of a kind; `test_launch.py` starts the job that is done.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.launch import torchrun
from tests.launcher.launched import launch
from tests.launcher.script_trainings import CHECKOUT

SECONDS = 60.0
"""Time for a job to be gone: see tests/end_to_end/test_endings.py."""
SCRIPT = CHECKOUT / "pretrain_small.py"
FLAGS = ("--zero-bubble-cpu", "--zero-bubble", "--pipeline-model-parallel-size", "2")
FOR_EVER = ("--train-iters", "1000000")
HANDLER = ("--exit-signal-handler",)
POST_VALIDATION = ("--zero-bubble-post-validation", "--log-interval", "1")
"""It has more to stop than a training without."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    jobs: list[Job] = []

    def start_job(*more: str, script: Path = SCRIPT) -> Job:
        command = torchrun(2, "-m", "megatron.zero_bubble", str(script), *FLAGS, "--save", str(tmp_path), *more)
        jobs.append(Job(command, tmp_path))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end(0.0)


def script_with(fault: str, folder: Path) -> Path:
    """A copy of the script that runs this statement after it has read a microbatch."""
    shutil.copytree(SCRIPT.parent, folder / "checkout")
    script = folder / "checkout" / SCRIPT.name
    reads = "batch = next(data_iterator)"
    script.write_text(SCRIPT.read_text().replace(reads, f"{reads}\n        {fault}"))
    return script


@pytest.mark.exhaustive
def test_an_error_in_the_script(start, tmp_path: Path) -> None:
    """The loader's workers end too, although the traceback keeps the loader and SIGTERM does not end them."""
    job = start(*HANDLER, *FOR_EVER, script=script_with('assert get_args().rank == 0, "a planted error"', tmp_path))
    job.wait_until(lambda: "a planted error" in job.errors)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    assert "a planted error" in job.errors[job.errors.index("FAILED\n") :], "torchrun's summary"


def test_a_signal_saves_where_the_script_does(tmp_path: Path) -> None:
    script = script_with("signal.raise_signal(signal.SIGTERM)", tmp_path)
    job = launch(2, script, *FLAGS, "--save", str(tmp_path), *HANDLER, *FOR_EVER, *POST_VALIDATION)
    assert job.status == 0, job.errors
    assert "exiting program at iteration" in job.output
    assert (tmp_path / "rank_1.pt").exists()


@pytest.mark.exhaustive
def test_a_signal_to_torchrun_saves_where_the_script_does(start, tmp_path: Path) -> None:
    job = start(*HANDLER, *FOR_EVER, *POST_VALIDATION)
    job.wait_for_iteration(3)
    job.launcher.terminate()
    status, left, seconds = job.end(SECONDS)
    assert left == [], f"{left} after {seconds} s: {job.errors}"
    assert status == 1, "torchrun's own, when it is told to stop"
    assert "exiting program at iteration" in job.output
    assert (tmp_path / "rank_1.pt").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_a_rank_ends_the_job(start, number: signal.Signals) -> None:
    job = start(*FOR_EVER)
    job.wait_for_iteration(3)
    job.ranks()[0].send_signal(number)
    status, left, seconds = job.end(SECONDS)
    assert left == [], f"{left} after {seconds} s: {job.errors}"
    assert status == 1
    assert f"Signal {number.value} ({number.name}) received" in job.errors
