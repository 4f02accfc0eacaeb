"""However a job under the launcher ends, all of its processes are gone soon, with a status that tells how it went.

`make test` runs a signal. Of the other ways to end, which `tests/end_to_end/test_endings.py` tests as well, through the
same code, one of a kind is exhaustive here; `test_launch.py` starts the job that is done.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.launch import torchrun
from tests.launcher.script_trainings import CHECKOUT

SECONDS = 60.0
"""Time for a job to be gone: see tests/end_to_end/test_endings.py."""
SCRIPT = CHECKOUT / "pretrain_small.py"
FOR_EVER = ("--train-iters", "1000000")
HANDLER = ("--exit-signal-handler",)
POST_VALIDATION = ("--zero-bubble-post-validation", "--log-interval", "1")
"""It has more to stop than a training without."""


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


def test_a_signal_saves_where_the_script_does(start, tmp_path: Path) -> None:
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
