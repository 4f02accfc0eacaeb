"""A run that is cut short and resumed goes on as if nothing had happened.

`make test` kills a training and resumes it. Exhaustive are other schedules and optimizers, and the state after a crash
in a save, whose files are tested in `test_checkpoint_files.py`. In `test_endings.py` whole jobs are killed.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.changes import KilledRank, Signalled
from tests.launch import TINY_GPT
from tests.trainings import run_trainings

FLAGS = (
    *(*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--train-iters", "30"),
    *("--lr-decay-style", "cosine", "--lr-warmup-iters", "5", "--eval-interval", "7", "--eval-iters", "1"),
    *("--num-workers", "2"),
)
# Jobs that are compared must have the same layout; test_chosen_layout.py resumes one that was chosen.
OURS = (*FLAGS, "--zero-bubble", "--zero-bubble-keep-layout")


def saving(folder: Path) -> tuple[str, ...]:
    """Flags of a job in this folder, which saves there and evaluates on the corpus there."""
    save = ("--save", str(folder / "checkpoints"), "--save-interval", "10")
    return *save, "--valid-data-path", str(folder / "corpus")


def loading(folder: Path) -> tuple[str, ...]:
    return "--load", str(folder / "checkpoints")


def latest(folder: Path) -> str:
    return (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()


def evaluations(printed: str) -> list[str]:
    """The loss of each evaluation."""
    return re.findall(r"^ validation loss at iteration \d+ \| lm loss value: (\S+)", printed, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that never stopped: its numbers, output, and checkpoints of iterations 10, 20 and 30."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    printed = run_trainings(2, {"numerics": [*OURS, *saving(folder)]}, folder)
    (folder / "printed.txt").write_text(printed["numerics"])
    return folder


@pytest.fixture
def stopped(uninterrupted: Path, tmp_path: Path) -> Path:
    """The same folder with the checkpoint of iteration 20 as the latest; that of iteration 30 is left in its place."""
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    return tmp_path


def test_killed_and_resumed_equals_uninterrupted(uninterrupted: Path, tmp_path: Path) -> None:
    cut = [*OURS, *saving(tmp_path)]
    run_trainings(2, {"numerics": [*cut, KilledRank(14, rank=1)]}, tmp_path, status=-signal.SIGKILL)
    assert latest(tmp_path) == "10"
    printed = run_trainings(2, {"numerics": [*cut, *loading(tmp_path)]}, tmp_path)
    assert (tmp_path / "numerics.jsonl").read_bytes() == (uninterrupted / "numerics.jsonl").read_bytes()
    expected = evaluations((uninterrupted / "printed.txt").read_text())
    assert evaluations(printed["numerics"]) == expected[-3:]
    assert len(set(expected)) == len(expected) == 4, "each on other data"


@pytest.mark.exhaustive
def test_a_half_written_checkpoint_is_not_picked_up(uninterrupted: Path, stopped: Path) -> None:
    """The folder is as after a crash in the save of iteration 30: its files have another name, the tracker says 20."""
    half = stopped / "checkpoints" / "iter_0000030.incomplete"
    (stopped / "checkpoints" / "iter_0000030").rename(half)
    (half / "metadata.json").unlink()
    next(half.glob("*.distcp")).write_bytes(b"cut short")
    printed = run_trainings(2, {"numerics": [*OURS, *saving(stopped), *loading(stopped)]}, stopped)
    assert "at iteration 20" in printed["numerics"]
    assert (stopped / "numerics.jsonl").read_bytes() == (uninterrupted / "numerics.jsonl").read_bytes()
    assert (stopped / "checkpoints" / "iter_0000030" / "metadata.json").exists()
    assert not half.exists()


@pytest.mark.exhaustive
def test_megatron_cores_schedule_resumes_from_ours(uninterrupted: Path, stopped: Path) -> None:
    """A checkpoint says nothing of the schedule: the baseline goes on from it with the same numbers."""
    run_trainings(2, {"baseline": [*FLAGS, *saving(stopped), *loading(stopped)]}, stopped)
    lines = (stopped / "baseline.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(21, 31))
    assert lines == (uninterrupted / "numerics.jsonl").read_text().splitlines()[20:]


@pytest.mark.exhaustive
def test_a_signal_ends_an_evaluation_early(tmp_path: Path) -> None:
    """The job saves in the time that it has, and the resumed job evaluates on the samples that come next."""
    whole = [*OURS, "--train-iters", "14", "--eval-iters", "3", "--valid-data-path", str(tmp_path / "corpus")]
    first = [*whole, "--save", str(tmp_path / "checkpoints"), "--exit-signal-handler", Signalled(7, 1, signal.SIGTERM)]
    printed = run_trainings(2, {"whole": whole, "first": first, "second": [*whole, *loading(tmp_path)]}, tmp_path)
    assert " > no validation loss at iteration 7: SIGTERM\n" in printed["first"]
    assert "exiting at iteration 7: SIGTERM" in printed["first"]
    lines = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("whole", "second")]
    assert lines[1] == lines[0][7:]
    assert evaluations(printed["second"]) == evaluations(printed["whole"])[1:]


SKIPPED = ("--fp16", "--initial-loss-scale", str(2**21), "--hysteresis", "1")
"""The loss scale is too large for the first steps: when the job is cut, no state has seen one."""
EXPERTS = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--disable-bias-linear")
IN_ONE_STAGE = (*EXPERTS, "--moe-layer-freq", "([0]*2+[1]*2)")
"""Rank 0, which saves the hyperparameters and numbers of steps for all ranks, has no experts."""
STAGES = ("--pipeline-model-parallel-size", "4", "--zero-bubble-seed-by-layer", "--pipeline-model-parallel-layout")
PADDED = ("--use-distributed-optimizer", "--hidden-size", "64", "--num-layers", "2")
"""A buffer begins with the bucket of the tied embedding, which is padded; other layers of TINY_GPT need no padding."""
SMALL_BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
OPTIMIZERS = {
    "bf16-overlap": ("--use-distributed-optimizer", "--bf16", "--overlap-grad-reduce", "--overlap-param-gather"),
    "post-validation": ("--use-distributed-optimizer", "--zero-bubble-post-validation"),
    "experts": ("--use-distributed-optimizer", *EXPERTS),
    "experts-in-one-stage": IN_ONE_STAGE,
    "experts-in-one-stage-bf16": (*IN_ONE_STAGE, "--bf16", "--zero-bubble-post-validation"),
    "experts-in-one-stage-sharded": (*IN_ONE_STAGE, "--use-distributed-optimizer"),
    "no-biases-on-rank-0": (*STAGES, "E|tt|tt|L", "--bf16"),
    "no-parameters": (*STAGES, "Et||tt|tL"),
    "no-parameters-sgd": (*STAGES, "Et||tt|tL", "--optimizer", "sgd", "--lr", "0.1"),
    "padded": PADDED,
    "padded-buckets": (*PADDED, "--untie-embeddings-and-output-weights", *SMALL_BUCKETS, "--bf16"),
    "instances": ("--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"),
    "sgd": ("--optimizer", "sgd", "--lr", "0.1"),
    "sgd-skipped": ("--optimizer", "sgd", "--lr", "0.1", *SKIPPED),
    "adam-skipped": SKIPPED,
    "sharded-skipped": ("--use-distributed-optimizer", *SKIPPED),
}


@pytest.mark.parametrize(
    "name", ["padded", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OPTIMIZERS if name != "padded")]
)
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
