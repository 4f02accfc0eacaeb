"""However a job ends, all of its processes are gone soon, with a status that tells how it went.

Every training here runs under the defaults: loader workers, clipping, evaluation, saving, data from files.

`make test` runs each way to end once (done, an error, a signal), with post-validation, which has more to stop. What is
exhaustive ends by other signals, on other ranks, with other flags, by the death of torchrun, whose ranks then get
the same signal, or again and again.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failing_training import FAULT
from tests.jobs import Job, kill
from tests.launch import PRETRAIN, ROOT, torchrun, write_corpus

SECONDS = 60.0
"""Time for a job to be gone once there is a reason: far above what it takes, less than a second to eight on a machine
with nothing else to do, so that only one that hangs is late."""
SECONDS_TO_KILL = 90.0
"""Time where torchrun has to kill a rank: it waits for 30 s."""
FAILING = ROOT / "tests" / "failing_training.py"
POST_VALIDATION = ("--zero-bubble-post-validation",)
WAITING = pytest.param((), marks=pytest.mark.exhaustive, id="waiting")
WITH_AND_WITHOUT = pytest.mark.parametrize("more", [WAITING, pytest.param(POST_VALIDATION, id="post-validation")])
HANDLER = ("--exit-signal-handler",)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    write_corpus(prefix)
    return prefix


def flags(corpus: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
        *("--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-2", "--log-interval", "1"),
        *("--train-data-path", "1", str(corpus), "--valid-data-path", "1", str(corpus)),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "120"),
        *("--eval-interval", "4", "--eval-iters", "1"),
        *("--save", str(folder / "checkpoints"), "--save-interval", "3"),
        *("--pipeline-model-parallel-size", "2", "--zero-bubble", "--train-iters", "8"),
        *more,
    ]


def latest(folder: Path) -> int:
    """The iteration of the latest checkpoint; 0 where there is none."""
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


@pytest.fixture
def start(corpus: Path, tmp_path: Path) -> Iterator:
    jobs: list[Job] = []

    def start_job(*more: str, fault: str = "") -> Job:
        script: tuple[str, ...] = (str(PRETRAIN),)
        if fault:
            # It is planted at a microbatch of a rank with one stage: a rank with two may read each of them twice.
            script, more = (str(FAILING), f"{FAULT}{fault}"), (*more, "--zero-bubble-keep-layout")
        jobs.append(Job(torchrun(2, *script, *flags(corpus, tmp_path, *more)), tmp_path))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end(0.0)


@WITH_AND_WITHOUT
def test_a_training_that_is_done(start, tmp_path: Path, more) -> None:
    """Its data loaders end with it, although post-validation or a signal handler may still refer to them."""
    job = start(*HANDLER, *more)
    job.wait_until(lambda: "validated checkpoint" in job.output or latest(tmp_path) == 8)
    assert job.end(SECONDS)[:2] == (0, []), job.errors
    assert "iteration        8/       8" in job.output
    assert "validation loss at iteration 8" in job.output


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flag", "more"),
    [(("--exit-interval", "2"), ()), (("--exit-duration-in-mins", "0.0001"), POST_VALIDATION)],
    ids=["exit-interval", "exit-duration"],
)
def test_a_training_that_stops_early_saves(start, tmp_path: Path, flag, more) -> None:
    job = start(*flag, *more, "--train-iters", "100000")
    job.wait_until(lambda: "exiting at iteration" in job.output)
    assert job.end(SECONDS)[:2] == (0, []), job.errors
    assert f"exiting at iteration {latest(tmp_path)}: {flag[0]}" in job.output


@pytest.mark.parametrize(
    ("rank", "more"),
    [(0, POST_VALIDATION), pytest.param(1, HANDLER, marks=pytest.mark.exhaustive)],
    ids=["first", "last"],
)
def test_an_error_on_a_rank_ends_all_and_is_in_torchruns_summary(start, tmp_path: Path, rank: int, more) -> None:
    """The other ranks end too, although they wait for a message and a handler may keep SIGTERM from ending them."""
    job = start(*more, "--train-iters", "100000", fault=f"error@{rank}@18")
    job.wait_until(lambda: "a planted error" in job.errors)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    summary = job.errors[job.errors.index("FAILED\n") :]
    assert "a planted error" in summary
    assert latest(tmp_path) == 3


@pytest.mark.exhaustive
@WITH_AND_WITHOUT
def test_a_full_disk_ends_all_and_keeps_the_checkpoint_before(start, tmp_path: Path, more) -> None:
    """All ranks end, and the last complete checkpoint stays the latest."""
    job = start(*more, "--train-iters", "100000", fault="full disk@1@14")
    job.wait_until(lambda: "cannot be saved" in job.errors)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    assert latest(tmp_path) == 3


@pytest.mark.exhaustive  # launcher/test_launcher_endings.py has the same of a script
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@WITH_AND_WITHOUT
def test_a_signal_saves_where_it_is_asked_to(start, tmp_path: Path, number: signal.Signals, more) -> None:
    """A second request of the same kind changes nothing: Slurm and torchrun both pass SIGTERM on."""
    job = start(*HANDLER, *more, "--train-iters", "100000", "--save-interval", "100000")
    job.wait_for_iteration(5)
    ranks = job.ranks()
    job.launcher.send_signal(number)
    if number == signal.SIGTERM:
        for rank in ranks:
            rank.terminate()
    status, left, seconds = job.end(SECONDS)
    assert left == [], f"{left} after {seconds} s: {job.errors}"
    assert status == 1, "torchrun's own, when it is told to stop"
    assert f"exiting at iteration {latest(tmp_path)}: {number.name}" in job.output
    assert latest(tmp_path) >= 5
    assert "pretrain_gpt.py" not in job.errors.replace("error_file", ""), "a rank has complained"


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_job_that_was_not_asked_to_save(start, tmp_path: Path, number: signal.Signals) -> None:
    job = start("--train-iters", "100000", "--save-interval", "100000")
    job.wait_for_iteration(5)
    ranks = job.ranks()
    for rank in ranks:
        rank.send_signal(number)
    status, left, seconds = job.end(SECONDS)
    assert left == [], f"{left} after {seconds} s: {job.errors}"
    assert status == 1
    assert f"Signal {number.value} ({number.name}) received" in job.errors
    assert "Traceback" not in job.output
    assert latest(tmp_path) == 0


@pytest.mark.exhaustive
def test_torchrun_itself_is_killed(start, tmp_path: Path) -> None:
    """The ranks of a killed torchrun are told to stop, and save as at SIGTERM; they would train on unseen."""
    job = start(*HANDLER, "--train-iters", "100000", "--save-interval", "100000")
    job.wait_for_iteration(5)
    job.launcher.kill()
    assert job.end(SECONDS)[:2] == (-signal.SIGKILL, []), job.errors
    assert latest(tmp_path) >= 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("times", [2, 20])
def test_killed_at_random_moments(start, tmp_path: Path, times: int) -> None:
    """A job that is killed repeatedly, also while it starts or saves, has the numbers of one that never stopped."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    # Two jobs are compared, which must have the same layout.
    dropout = ("--train-iters", "60", "--save-interval", "1", "--zero-bubble-keep-layout", *POST_VALIDATION)
    job = start(*dropout, "--log-numerics", str(whole), "--save", str(tmp_path / "whole-checkpoints"))
    assert job.end(300.0)[:2] == (0, []), job.errors
    chance = random.Random(times)
    resumed = ("--log-numerics", str(cut), *dropout)
    for _ in range(times):
        load = ("--load", str(tmp_path / "checkpoints")) if latest(tmp_path) else ()
        job = start(*resumed, *load)
        target = latest(tmp_path) + 1 + chance.randrange(3)
        job.wait_until(lambda target=target: latest(tmp_path) >= target)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.3))
        ranks = job.ranks()
        if ranks:
            kill(chance.choice(ranks))
        status, left, seconds = job.end(SECONDS_TO_KILL)
        assert left == [], f"{left} after {seconds} s: {job.errors}"
        assert status != 0 or latest(tmp_path) == 60
    job = start(*resumed, "--load", str(tmp_path / "checkpoints"))
    assert job.end(300.0)[:2] == (0, []), job.errors
    assert [json.loads(line)["iteration"] for line in cut.read_text().splitlines()] == list(range(1, 61))
    assert cut.read_bytes() == whole.read_bytes()
