"""The Slurm examples on a real Slurm: two nodes of two CPU ranks. `make test-slurm` installs it and runs this."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import ROOT
from tests.slurm.cluster import Cluster, Job, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

EXAMPLES = ROOT / "examples" / "slurm"
FLAGS = ("--vocab-size", "120", "--log-interval", "1", "--eval-iters", "0")
ITERATIONS = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with Cluster(folder) as running:
        yield running
    assert running.processes() == []


def submit(cluster: Cluster, script: str, folder: Path, *flags: str, **variables: str) -> Job:
    """Submit an example for two nodes; its logs and checkpoints go into `folder`."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "REPOSITORY": str(ROOT),
        "MODEL": "tests/slurm/toy.sh",
        "RANKS_PER_NODE": "2",
        "TRAIN_ITERS": str(ITERATIONS),
        "LOGS": str(folder / "logs"),
        "CHECKPOINTS": str(folder / "checkpoints"),
        **variables,
    }
    options = ("--nodes=2", "--gpus-per-node=0", f"--output={folder}/output")
    return cluster.submit(*options, str(EXAMPLES / script), *flags, environment=environment)


def pretrain(cluster: Cluster, folder: Path, *flags: str, **variables: str) -> Job:
    folder.mkdir(exist_ok=True)
    numerics = ("--log-numerics", str(folder / "numerics"))
    return submit(cluster, "pretrain_gpt.sbatch", folder, *FLAGS, *numerics, *flags, **variables)


def iterations(folder: Path) -> int:
    """The number of iterations that the training has done so far, by the lines of its numerics file."""
    numerics = folder / "numerics"
    return numerics.read_text().count("\n") if numerics.exists() else 0


def finish(job: Job, folder: Path) -> str:
    """Wait until the job has ended, assert that it completed, and return what it printed."""
    state = job.wait_for("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", timeout=400)
    output = (folder / "output").read_text()
    assert state == "COMPLETED", output
    return output


def test_a_job_trains_across_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = pretrain(cluster, tmp_path, SCHEDULE="zb-h1", TRAIN_ITERS="5")
    output = finish(job, tmp_path)
    assert "> host n1 holds stages 0-1 on ranks 0-1" in output
    assert "> host n2 holds stages 2-3 on ranks 2-3" in output
    assert "> pipeline schedule: zb-h1" in output
    assert "> layers of each stage: 1, 2, 2, 1" in output
    assert re.search(r"iteration +5/ +5 \|", output)
    assert iterations(tmp_path) == 5
    logs = sorted(str(log.relative_to(tmp_path / "logs")) for log in (tmp_path / "logs").rglob("stdout.log"))
    places = [(words[2], words[-2]) for words in (log.split("/") for log in logs)]
    assert places == [("n1", "0"), ("n1", "1"), ("n2", "0"), ("n2", "1")]
    assert job.fields["Restarts"] == "0"


def test_a_job_that_is_interrupted_saves_and_goes_on_bit_for_bit(cluster: Cluster, tmp_path: Path) -> None:
    """The job is preempted by one of higher priority, and later warned as before its time limit.

    Iterations and checkpoints in its flags override those in its variables.
    """
    interrupted, uninterrupted = tmp_path / "interrupted", tmp_path / "uninterrupted"
    given = ("--train-iters", str(ITERATIONS), f"--save={interrupted / 'checkpoints'}")
    job = pretrain(cluster, interrupted, *given, SCHEDULE="zb-2p", TRAIN_ITERS="5", CHECKPOINTS=str(tmp_path / "other"))
    cluster.wait_until(lambda: iterations(interrupted) >= 10, "ten iterations")
    urgent = cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true", "--output=/dev/null")
    urgent.wait_for("COMPLETED")
    saved = int((interrupted / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert 10 <= saved < ITERATIONS
    cluster.wait_until(lambda: iterations(interrupted) >= saved + 10, "ten iterations more")
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    output = finish(job, interrupted)
    assert job.fields["Restarts"] == "2"
    assert len(re.findall("the job goes back into the queue", output)) == 2
    finish(pretrain(cluster, uninterrupted, SCHEDULE="zb-2p"), uninterrupted)
    assert iterations(uninterrupted) == ITERATIONS
    assert (interrupted / "numerics").read_bytes() == (uninterrupted / "numerics").read_bytes()


def ranks(cluster: Cluster) -> list[str]:
    """Command lines of all ranks that run."""
    return [line for line in (" ".join(process.cmdline()) for process in cluster.processes()) if "pretrain_gpt" in line]


def test_a_node_that_dies_ends_the_step_and_the_job_goes_on_when_it_is_back(cluster: Cluster, tmp_path: Path) -> None:
    job = pretrain(cluster, tmp_path, "--save-interval", "5", SCHEDULE="zb-h1", TRAIN_ITERS="30")
    cluster.wait_until(lambda: iterations(tmp_path) >= 8, "eight iterations")
    cluster.kill_node("n2")
    job.wait_for("PENDING", timeout=120)
    assert ranks(cluster) == []
    cluster.start_node("n2")
    finish(job, tmp_path)
    assert job.fields["Restarts"] == "1"
    assert iterations(tmp_path) == 30


def test_a_job_that_fails_without_having_come_further_is_not_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    job = pretrain(cluster, tmp_path, "--num-layers", "5", SCHEDULE="zb-h1")
    job.wait_for("FAILED")
    assert "error: --num-layers 5 and, by " in (tmp_path / "output").read_text()


def test_schedules_are_compared_in_one_allocation(cluster: Cluster, tmp_path: Path) -> None:
    quick = ("--rounds", "1", "--warmup", "7", "--iterations", "3", "--interval", "1")
    job = submit(cluster, "compare.sbatch", tmp_path, *quick, "--json", SCHEDULES="zb-h1", VOCAB_SIZE="120")
    finish(job, tmp_path)
    results = json.loads((tmp_path / "logs" / "comparison.txt").read_text())
    assert "zb-h1" in json.dumps(results)
    assert "megatron-core 1F1B" in json.dumps(results)
