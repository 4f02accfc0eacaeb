"""A run that is cut short and resumed goes on as if nothing had happened.

`make test` kills a job and resumes it. In `make test-all` are also what
`test_endings.py`, `test_save_lock.py` and `test_checkpoint_files.py` test in essence, and the other optimizers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from megatron.zero_bubble.training.save_lock import lock_folder
from tests.launch import PRETRAIN, TINY_GPT, environment, run, run_trainings, torchrun


def flags(folder: Path, *more: str) -> list[str]:
    return [
        *TINY_GPT,
        *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "30"),
        # Jobs that are compared must have the same layout; test_chosen_layout.py resumes one that was chosen.
        *("--zero-bubble", "--zero-bubble-keep-layout"),
        *("--save", str(folder / "checkpoints"), "--save-interval", "10", "--log-numerics", str(folder / "numerics")),
        *("--lr-decay-style", "cosine", "--lr-warmup-iters", "5", "--eval-interval", "7", "--eval-iters", "1"),
        *more,
    ]


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process, launcher first, whose command line names `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(str(folder) in word for word in process.cmdline()):
                found.append(process)
    return found


def ranks_of(folder: Path, job: subprocess.Popen[str]) -> list[psutil.Process]:
    return [process for process in processes_of(folder) if process.pid != job.pid]


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start the training, its output in a file; return when it has done three iterations."""
    with open(folder / "output", "w") as output:
        # A pipe would be kept open by what the ranks have started, after they are dead.
        job = subprocess.Popen(
            torchrun(2, PRETRAIN, *flags(folder, *more)), env=environment(), stdout=output, stderr=output, text=True
        )
    wait_for_iterations(folder, 3, job)
    return job


def wait_for_iterations(folder: Path, count: int, job: subprocess.Popen[str]) -> None:
    numerics, deadline = folder / "numerics", time.monotonic() + 90
    while not numerics.exists() or numerics.read_text().count("\n") < count:
        assert job.poll() is None, "the run ended early: " + (folder / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = run(2, PRETRAIN, *flags(folder))
    assert result.returncode == 0, result.stderr
    return folder


def test_killed_and_resumed_equals_uninterrupted(uninterrupted: Path, tmp_path: Path) -> None:
    job = start(tmp_path)
    wait_for_iterations(tmp_path, 12, job)
    for process in processes_of(tmp_path):
        with contextlib.suppress(psutil.Error):
            process.kill()
    job.wait(timeout=30)
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "10"
    result = run(2, PRETRAIN, *flags(tmp_path, "--load", str(tmp_path / "checkpoints")))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "numerics").read_bytes() == (uninterrupted / "numerics").read_bytes()


@pytest.mark.exhaustive
def test_a_half_written_checkpoint_is_not_picked_up(uninterrupted: Path, tmp_path: Path) -> None:
    """The folder is as after a crash in the save of iteration 30: its files have another name, the tracker says 20."""
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "checkpoints")
    half = tmp_path / "checkpoints" / "iter_0000030.incomplete"
    (tmp_path / "checkpoints" / "iter_0000030").rename(half)
    (half / "metadata.json").unlink()
    next(half.glob("*.distcp")).write_bytes(b"cut short")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    shutil.copy(uninterrupted / "numerics", tmp_path / "numerics")
    result = run(2, PRETRAIN, *flags(tmp_path, "--load", str(tmp_path / "checkpoints")))
    assert result.returncode == 0, result.stderr
    assert "at iteration 20" in result.stdout
    assert (tmp_path / "numerics").read_bytes() == (uninterrupted / "numerics").read_bytes()
    assert (tmp_path / "checkpoints" / "iter_0000030" / "metadata.json").exists()
    assert not half.exists()


@pytest.mark.exhaustive
def test_megatron_cores_schedule_resumes_from_ours(uninterrupted: Path, tmp_path: Path) -> None:
    """A checkpoint says nothing of the schedule: the baseline goes on from it with the same numbers."""
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    ours = flags(tmp_path, "--load", str(tmp_path / "checkpoints"))
    baseline = [flag for flag in ours if not flag.startswith("--zero-bubble")]
    result = run(2, PRETRAIN, *baseline)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "numerics").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(21, 31))
    assert lines == (uninterrupted / "numerics").read_text().splitlines()[20:]


@pytest.mark.exhaustive
def test_sigterm_saves_and_exits(tmp_path: Path) -> None:
    job = start(tmp_path, "--train-iters", "100000", "--save-interval", "100000", "--exit-signal-handler")
    for process in ranks_of(tmp_path, job):
        process.terminate()
    status, output = job.wait(timeout=60), (tmp_path / "output").read_text()
    assert status == 0, output
    assert "SIGTERM" in output
    last = json.loads((tmp_path / "numerics").read_text().splitlines()[-1])["iteration"]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(last)


@pytest.mark.exhaustive
def test_no_other_job_saves_to_the_folder_of_one_that_lives(tmp_path: Path) -> None:
    job = start(tmp_path, "--train-iters", "100000", "--save-interval", "100000")
    ranks = ranks_of(tmp_path, job)
    refused = run(2, PRETRAIN, *flags(tmp_path))
    assert refused.returncode != 0
    assert "iteration" not in refused.stdout
    (line,) = re.findall(r"^pretrain_gpt\.py: error: (.*)", refused.stderr, flags=re.MULTILINE)
    holder = re.fullmatch(rf"--save {tmp_path}/checkpoints: process (\d+) on .*, since .*, saves there: .*", line)
    assert holder is not None, line
    assert int(holder[1]) in [rank.pid for rank in ranks]
    for process in processes_of(tmp_path):
        process.kill()
    job.wait(timeout=30)
    lock_folder(tmp_path / "checkpoints", {}, pytest.fail).close()


@pytest.mark.exhaustive
def test_a_dead_rank_takes_the_job_down(tmp_path: Path) -> None:
    job = start(tmp_path, "--train-iters", "100000", "--save-interval", "100000")
    ranks_of(tmp_path, job)[0].kill()
    assert job.wait(timeout=60) != 0
    assert processes_of(tmp_path) == []


SKIPPED = ("--fp16", "--initial-loss-scale", str(2**21), "--hysteresis", "1")
"""The loss scale is too large for the first steps: when the job is cut, no state has seen one."""
OPTIMIZERS = {
    "bf16-overlap": ("--use-distributed-optimizer", "--bf16", "--overlap-grad-reduce", "--overlap-param-gather"),
    "post-validation": ("--use-distributed-optimizer", "--zero-bubble-post-validation"),
    "experts": (
        "--use-distributed-optimizer",
        "--num-experts",
        "4",
        "--expert-model-parallel-size",
        "2",
        "--disable-bias-linear",
    ),
    "instances": ("--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"),
    "sgd": ("--optimizer", "sgd", "--lr", "0.1"),
    "sgd-skipped": ("--optimizer", "sgd", "--lr", "0.1", *SKIPPED),
    "adam-skipped": SKIPPED,
    "sharded-skipped": ("--use-distributed-optimizer", *SKIPPED),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    """Six iterations, at once and in two jobs, in two replicas, which may share the state of the optimizer.

    Without apex and Transformer Engine megatron-core cannot load what it saves of a sharded one and of SGD.
    """
    base = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--clip-grad", "0.1"]
    base += ["--zero-bubble-schedule", "zb-2p", "--lr-decay-style", "cosine", "--train-iters", "6", *OPTIMIZERS[name]]
    folder = str(tmp_path / "checkpoints")
    trainings = {
        "whole": base,
        "first": [*base, "--exit-interval", "3", "--save", folder],
        "second": [*base, "--load", folder],
    }
    # As people train: the log of numerics gathers parameters, which a checkpoint has to do by itself.
    run_trainings(4, trainings, tmp_path, unlogged=["first"])
    whole, second = ((tmp_path / f"{part}.jsonl").read_text().splitlines() for part in ("whole", "second"))
    assert len(whole) == 6
    assert second == whole[3:]
    is_skipped = [json.loads(line)["grad_norm"] is None for line in whole]
    assert is_skipped[:3] == [name.endswith("skipped")] * 3
    assert not all(is_skipped)
