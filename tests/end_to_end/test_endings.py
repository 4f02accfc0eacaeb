"""However a job ends, all of its processes are gone soon, with a status that tells how it went.

Every training here runs under the defaults: loader workers, clipping, evaluation, saving, data from files.

All are exhaustive, each started by torchrun once, some with post-validation and some without. `make test` ends a script
by a signal (`launcher/test_main_endings.py`) and trainings on ranks that are there, by errors, faults of the disk and
kills (`test_finite.py`, `trainer/test_checkpoint_faults.py`, `test_resume.py`). What the loop does before its last
iteration, and most kills at random moments, need no torchrun here either.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch.distributed as dist

from megatron.zero_bubble.cli.check.matrix import write_corpus
from megatron.zero_bubble.runtime.processes import tie_children
from tests.changes import Change, Run, Signalled
from tests.failing_training import command, die_in_a_copy, fill_disk, fill_host_memory, raise_error, write_for_ever
from tests.jobs import Job, kill
from tests.launch import PRETRAIN, torchrun
from tests.trainings import run_trainings

pytestmark = pytest.mark.exhaustive

SECONDS = 120.0
"""Time for a job to be gone once there is a reason: far above what it takes, less than a second to eight on a machine
with nothing else to do, so that only one that hangs is late."""
SECONDS_TO_KILL = 180.0
"""Time where torchrun has to kill a rank: it waits for 30 s."""
POST_VALIDATION = ("--zero-bubble-post-validation",)
HANDLER = ("--exit-signal-handler",)
FOR_EVER = ("--train-iters", "100000", "--save-interval", "100000")


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
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "120", "--num-workers", "2"),
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

    def start_job(*more: str, fault: tuple[Callable[[], None], int, int] | None = None) -> Job:
        """Start a training of two ranks; `fault` has the arguments of `failing_training.command`."""
        script: tuple[str, ...] = (str(PRETRAIN),)
        if fault is not None:
            # It is planted at a microbatch of a rank with one stage: a rank with two may read each of them twice.
            script, more = command(*fault), (*more, "--zero-bubble-keep-layout")
        jobs.append(Job(torchrun(2, *script, *flags(corpus, tmp_path, *more)), tmp_path))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end(0.0)


def test_a_training_that_is_done(start, tmp_path: Path) -> None:
    """Its data loaders end with it, although post-validation or a signal handler may still refer to them."""
    job = start(*HANDLER, *POST_VALIDATION)
    job.wait_until(lambda: "validated checkpoint" in job.output or latest(tmp_path) == 8)
    assert job.end(SECONDS)[:2] == (0, []), job.errors
    assert "iteration        8/       8" in job.output
    assert "validation loss at iteration 8" in job.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(("--exit-interval", "2"), "--exit-interval 2", id="exit-interval"),
        pytest.param(
            ("--exit-duration-in-mins", "0.0001", *POST_VALIDATION),
            "--exit-duration-in-mins 0.0001",
            id="exit-duration",
        ),
        pytest.param((*HANDLER, Signalled(5, 1, signal.SIGTERM)), "SIGTERM", id="SIGTERM"),
    ],
)
def test_a_training_that_stops_early_saves(corpus: Path, tmp_path: Path, words: tuple, reason: str) -> None:
    long = [*flags(corpus, tmp_path), "--train-iters", "100000", *words]
    printed = run_trainings(2, {"short": long}, tmp_path)["short"]
    assert f"exiting at iteration {latest(tmp_path)}: {reason}" in printed
    last = (tmp_path / "short.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["iteration"] == latest(tmp_path) > 0


@pytest.mark.parametrize(
    ("rank", "more"),
    [(0, POST_VALIDATION), (1, HANDLER)],
    ids=["first", "last"],
)
def test_an_error_on_a_rank_ends_all_and_is_in_torchruns_summary(start, tmp_path: Path, rank: int, more) -> None:
    """The other ranks end too, although they wait for a message and a handler may keep SIGTERM from ending them."""
    job = start(*more, "--train-iters", "100000", fault=(raise_error, rank, 18))
    job.wait_until(lambda: "a planted error" in job.errors)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    summary = job.errors[job.errors.index("FAILED\n") :]
    assert "a planted error" in summary
    assert latest(tmp_path) == 3


def test_a_full_disk_ends_all_and_keeps_the_checkpoint_before(start, tmp_path: Path) -> None:
    """All ranks end with one line, and the last complete checkpoint stays the latest."""
    job = start(*POST_VALIDATION, "--train-iters", "100000", fault=(fill_disk, 1, 14))
    job.wait_until(lambda: "cannot be saved" in job.errors)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    (line,) = re.findall(r"^pretrain_gpt\.py: error: (.*)", job.errors, flags=re.MULTILINE)
    folder = tmp_path / "checkpoints"
    # torch's writer keeps the system's words to itself, unless the limit is reached as its file is closed.
    reasons = ("a write failed, as on a full disk", "File too large")
    assert line in [f"--save {folder}: iteration 6 cannot be saved: {why} (latest there: 3)" for why in reasons]
    assert 'failing_training.py", line' not in job.errors, "a traceback: " + job.errors
    assert latest(tmp_path) == 3
    assert {path.name for path in folder.iterdir()} == {"iter_0000003", "latest_checkpointed_iteration.txt"}


COPIES = ("--zero-bubble-offload", "auto", "--zero-bubble-memory-limit", "1", *FOR_EVER)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_without_memory_for_activations_ends_all_with_one_line(start, rank: int) -> None:
    job = start(*COPIES, fault=(fill_host_memory, rank, 1))
    job.wait_until(lambda: "has no room" in job.errors)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    (line,) = re.findall(r"^pretrain_gpt\.py: error: (.*)", job.errors, flags=re.MULTILINE)
    assert re.match(r"the host has no room for \d+ more bytes of activations, beside 0: raise ", line)
    assert 'failing_training.py", line' not in job.errors, "a traceback: " + job.errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_copies_ends_all(start, rank: int) -> None:
    job = start(*COPIES, fault=(die_in_a_copy, rank, 5))
    job.wait_until(lambda: "SIGKILL" in job.errors)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    assert "iteration        1/" in job.output


def writers(job: Job, path: Path) -> list[psutil.Process]:
    """The processes of a job that have a file open."""
    found = []
    for process in job.processes():
        with contextlib.suppress(psutil.Error):
            if str(path) in {file.path for file in process.open_files()}:
                found.append(process)
    return found


def test_a_process_that_writes_a_checkpoint_is_killed(start, tmp_path: Path) -> None:
    """As the system kills one where memory runs out. No rank waits for it, and the last complete checkpoint stays."""
    job = start(*POST_VALIDATION, "--train-iters", "100000", fault=(write_for_ever, 1, 14))
    path = tmp_path / "checkpoints" / "iter_0000006.incomplete" / "__1_0.distcp"
    job.wait_until(lambda: bool(writers(job, path)))
    for process in writers(job, path):
        kill(process)
    assert job.end(SECONDS)[:2] == (1, []), job.errors
    assert "Signal 9 (SIGKILL) received" in job.errors
    assert latest(tmp_path) == 3


def test_a_signal_saves_where_it_is_asked_to(start, tmp_path: Path) -> None:
    """A second request of the same kind changes nothing: Slurm and torchrun both pass SIGTERM on."""
    job = start(*HANDLER, *POST_VALIDATION, *FOR_EVER)
    job.wait_for_iteration(5)
    ranks = job.ranks()
    job.launcher.terminate()
    for rank in ranks:
        rank.terminate()
    status, left, seconds = job.end(SECONDS)
    assert left == [], f"{left} after {seconds} s: {job.errors}"
    assert status == 1, "torchrun's own, when it is told to stop"
    assert f"exiting at iteration {latest(tmp_path)}: SIGTERM" in job.output
    assert latest(tmp_path) >= 5
    assert "pretrain_gpt.py" not in job.errors.replace("error_file", ""), "a rank has complained"


def test_a_signal_ends_a_job_that_was_not_asked_to_save(start, tmp_path: Path) -> None:
    job = start(*FOR_EVER)
    job.wait_for_iteration(5)
    for rank in job.ranks():
        rank.send_signal(signal.SIGINT)
    status, left, seconds = job.end(SECONDS)
    assert left == [], f"{left} after {seconds} s: {job.errors}"
    assert status == 1
    assert f"Signal {signal.SIGINT.value} (SIGINT) received" in job.errors
    assert "Traceback" not in job.output
    assert latest(tmp_path) == 0


def test_torchrun_itself_is_killed(start, tmp_path: Path) -> None:
    """The ranks of a killed torchrun are told to stop, and save as at SIGTERM; they would train on unseen."""
    job = start(*HANDLER, *FOR_EVER)
    job.wait_for_iteration(5)
    job.launcher.kill()
    assert job.end(SECONDS)[:2] == (-signal.SIGKILL, []), job.errors
    assert latest(tmp_path) >= 5


@dataclass(frozen=True)
class KilledInTime(Change):
    """A rank is killed by a timer, whatever it does then; at the latest when the training is done.

    The signal is SIGALRM, which ends a process as SIGKILL does.
    """

    rank: int
    save: int
    """The timer begins with this save, counted from 1; 0 for the start of the training."""
    seconds: float

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.zero_bubble.trainer.checkpoint import Checkpointer

        if dist.get_rank() != self.rank:
            yield
            return
        save, calls = Checkpointer.save, count(1)

        def save_in_time(checkpointer: Any) -> None:
            if next(calls) == self.save:
                signal.setitimer(signal.ITIMER_REAL, self.seconds)
            save(checkpointer)

        tie_children()
        if self.save == 0:
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
        with mock.patch.object(Checkpointer, "save", save_in_time):
            yield
        os.kill(os.getpid(), signal.SIGALRM)


def test_killed_at_random_moments(start, corpus: Path, tmp_path: Path) -> None:
    """A job that is killed repeatedly, also while it starts or saves, has the numbers of one that never stopped.

    It is killed twice under torchrun, which must end the other rank, and then twelve times without.
    """
    # Two jobs are compared, which must have the same layout.
    dropout = ("--train-iters", "60", "--save-interval", "1", "--zero-bubble-keep-layout", *POST_VALIDATION)
    cut = flags(corpus, tmp_path, *dropout)
    at_the_end = ("--save-interval", "100000")
    run_trainings(2, {"whole": [*cut, *at_the_end, "--save", str(tmp_path / "whole-checkpoints")]}, tmp_path)

    def load() -> tuple[str, ...]:
        return ("--load", str(tmp_path / "checkpoints")) if latest(tmp_path) else ()

    chance = random.Random(20)
    for _ in range(2):
        data = ("--train-data-path", str(tmp_path / "corpus"), "--log-numerics", str(tmp_path / "cut.jsonl"))
        job = start(*dropout, *data, *load())
        target = latest(tmp_path) + 1 + chance.randrange(3)
        job.wait_until(lambda target=target: latest(tmp_path) >= target)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.3))
        ranks = job.ranks()
        if ranks:
            kill(chance.choice(ranks))
        status, left, seconds = job.end(SECONDS_TO_KILL)
        assert left == [], f"{left} after {seconds} s: {job.errors}"
        assert status != 0 or latest(tmp_path) == 60
    for _ in range(12):
        save = chance.randrange(4)
        fault = KilledInTime(chance.randrange(2), save, seconds=chance.uniform(0.0, 0.1 if save else 2.0))
        run_trainings(2, {"cut": [*cut, *load(), fault]}, tmp_path, status=-signal.SIGALRM)
    run_trainings(2, {"cut": [*cut, *at_the_end, *load()]}, tmp_path)
    lines = (tmp_path / "cut.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, 61))
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
