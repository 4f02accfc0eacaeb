"""Starts real ranks: what the end-to-end tests share."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from megatron.zero_bubble.cli.check.matrix import write_corpus
from tests.several_trainings import run_rank

ROOT = Path(__file__).parents[1]
PRETRAIN = ROOT / "pretrain_gpt.py"

TINY_GPT = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--lr", "1e-2", "--mock-data", "--vocab-size", "120"),
    *("--train-iters", "10", "--log-interval", "1"),
]
"""A model small enough that start-up is most of a run."""


def torchrun(num_ranks: int, script: str | Path, *flags: str) -> list[str]:
    """The command line that starts `script` on `num_ranks` processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launcher, str(script), *flags]


def environment() -> dict[str, str]:
    """One thread a rank: the ranks share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(num_ranks: int, script: str | Path, *flags: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr are captured."""
    command = torchrun(num_ranks, script, *flags)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)


def run_trainings(
    num_ranks: int,
    trainings: dict[str, Sequence[str]],
    folder: Path,
    unlogged: Collection[str] = (),
    status: int = 0,
) -> dict[str, str]:
    """Run several trainings in one job, each with `--log-numerics folder/NAME.jsonl`: start-up is paid once.

    Those named in `unlogged` are without that flag: it gathers parameters. In place of `--mock-data` they read a
    small corpus, whose index they share. The job must end with `status`; then what each printed is returned.
    """
    if not (folder / "corpus.idx").exists():
        write_corpus(folder / "corpus")
    data = ["--tokenizer-type", "NullTokenizer", "--train-data-path", str(folder / "corpus")]
    plan = {}
    for name, flags in trainings.items():
        given = [word for word in flags if word != "--mock-data"]
        plan[name] = [*given, *data]
        if name not in unlogged:
            plan[name] += ["--log-numerics", str(folder / f"{name}.jsonl")]
    job = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
    outputs = job / "stdout.txt", job / "stderr.txt"
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = (plan, folder, outputs, store.port)
    ended = run_forked(num_ranks, run_rank, arguments, timeout=300 + 10 * len(plan))
    stdout, stderr = (path.read_text() if path.exists() else "" for path in outputs)
    assert ended == status, f"status {ended}: {stdout[-3000:]}{stderr[-6000:]}"
    _, *parts = re.split(r"^training (.*)\n", stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


class Trainings:
    """Trainings by name, each of which runs when a test first asks for it: what is not tested costs nothing.

    Those named in `together` run in one job as soon as one of them is asked for: a start takes longer than a training.
    """

    def __init__(
        self,
        num_ranks: int,
        flags: Mapping[str, Sequence[str]],
        folder: Path,
        unlogged: Collection[str] = (),
        together: Collection[str] = (),
    ) -> None:
        assert flags.keys() >= {*unlogged, *together}
        self.folder = folder
        self._num_ranks, self._flags, self._unlogged, self._together = num_ranks, flags, unlogged, together
        self._printed: dict[str, str] = {}

    def run(self, *names: str) -> None:
        """Run those of the trainings that have not run yet, in one job and in the order in which they were given."""
        wanted = {*names, *(self._together if not {*names}.isdisjoint(self._together) else ())} - self._printed.keys()
        new = {name: flags for name, flags in self._flags.items() if name in wanted}
        if new:
            self._printed |= run_trainings(self._num_ranks, new, self.folder, self._unlogged)

    def numerics(self, name: str) -> bytes:
        self.run(name)
        return (self.folder / f"{name}.jsonl").read_bytes()

    def printed(self, name: str) -> str:
        self.run(name)
        return self._printed[name]


def run_as_started(body: Callable[..., None], *arguments: object) -> None:
    """Run `body(*arguments)` with the start method that processes have by default, as in a rank that torchrun starts.

    A process of a fork server would start its loader workers by one of its own, which import everything again.
    """
    multiprocessing.set_start_method(None, force=True)
    body(*arguments)


def run_forked(num_ranks: int, body: Callable[..., None], arguments: tuple[object, ...], timeout: float) -> int | None:
    """Run `body(rank, num_ranks, *arguments)` in processes that have everything imported already.

    All end with the first that fails. Returns its exit status; 0 if none fails, None if time runs out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rank_imports"])
    ranks = [
        context.Process(target=run_as_started, args=(body, rank, num_ranks, *arguments)) for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        running, deadline, status = {rank.sentinel: rank for rank in ranks}, time.monotonic() + timeout, 0
        while running and status == 0:
            ended = multiprocessing.connection.wait(list(running), deadline - time.monotonic())
            if not ended:
                return None
            for sentinel in ended:
                rank = running.pop(sentinel)  # type: ignore[index]
                rank.join()
                status = status or rank.exitcode or 0
        return status
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
