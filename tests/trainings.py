"""Runs trainings one after the other in the same ranks, and keeps what each printed and computed."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.zero_bubble.cli.check.matrix import write_corpus
from tests.changes import Change, Run
from tests.ranks import append_output, be_rank, run_on_ranks

Words = Sequence[str | Change]
"""The flags of a training, and the changes that it runs with."""


def run_trainings(
    num_ranks: int,
    trainings: Mapping[str, Words],
    folder: Path,
    unlogged: Collection[str] = (),
    status: int = 0,
) -> dict[str, str]:
    """Run trainings, each with `--log-numerics folder/NAME.jsonl`, in this order.

    In place of `--mock-data` they read a small corpus, whose index they share. Unless flags have `--num-workers`, ranks
    read it themselves: worker processes would take a third of the time of a training.

    Args:
        unlogged: names of trainings without `--log-numerics`, which gathers parameters.
        status: what the ranks must end with: 0, or the status of the rank that fails first.

    Returns:
        What each training printed.
    """
    if not (folder / "corpus.idx").exists():
        write_corpus(folder / "corpus")
    data = ["--tokenizer-type", "NullTokenizer", "--train-data-path", str(folder / "corpus")]
    plan: dict[str, tuple[list[str], list[Change]]] = {}
    for name, words in trainings.items():
        given = [word for word in words if isinstance(word, str) and word != "--mock-data"]
        flags = ["--num-workers", "0", *given, *data]
        if name not in unlogged:
            flags += ["--log-numerics", str(folder / f"{name}.jsonl")]
        plan[name] = flags, [word for word in words if isinstance(word, Change)]
    job = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
    outputs = job / "stdout.txt", job / "stderr.txt"
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ended = run_on_ranks(num_ranks, run_rank, (plan, folder, outputs, store.port), timeout=600 + 10 * len(plan))
    stdout, stderr = (path.read_text() if path.exists() else "" for path in outputs)
    assert ended == status, f"status {ended}: {stdout[-3000:]}{stderr[-6000:]}"
    _, *parts = re.split(r"^training (.*)\n", stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


class Trainings:
    """Trainings by name, each of which runs when a test first asks for it: what is not tested costs nothing."""

    def __init__(
        self, num_ranks: int, words: Mapping[str, Words], folder: Path, unlogged: Collection[str] = ()
    ) -> None:
        assert words.keys() >= {*unlogged}
        self.folder = folder
        self._num_ranks, self._words, self._unlogged = num_ranks, words, unlogged
        self._printed: dict[str, str] = {}

    def run(self, *names: str) -> None:
        """Run those of the trainings that have not run yet, in the order in which they were given."""
        new = {name: words for name, words in self._words.items() if name in names and name not in self._printed}
        if new:
            self._printed |= run_trainings(self._num_ranks, new, self.folder, self._unlogged)

    def numerics(self, name: str) -> bytes:
        self.run(name)
        return (self.folder / f"{name}.jsonl").read_bytes()

    def printed(self, name: str) -> str:
        self.run(name)
        return self._printed[name]


@contextlib.contextmanager
def process_group(rank: int, num_ranks: int, store: dist.Store) -> Iterator[None]:
    """A default process group of gloo. After it, nothing keeps its groups and their threads."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    yield
    dist.destroy_process_group()
    for _ in range(2):  # a model has cycles and holds groups; a tensor may need a second pass
        gc.collect()


def run_rank(
    rank: int,
    num_ranks: int,
    plan: dict[str, tuple[list[str], list[Change]]],
    folder: Path,
    outputs: tuple[Path, Path],
    port: int,
) -> None:
    """Be one rank of a job, which runs the trainings of `plan`.

    Args:
        plan: the flags and changes of each training, by its name.
        folder: where the trainings' files go.
        outputs: what the rank prints is appended to these files, stdout's first.
        port: of this machine, where the store is in which the ranks meet.
    """
    be_rank(rank, num_ranks)
    append_output(outputs)
    for number, (name, (flags, changes)) in enumerate(plan.items()):
        # Each training in process groups of its own: those of all together would have a thousand threads.
        store = dist.PrefixStore(str(number), dist.TCPStore("localhost", port))
        with process_group(rank, num_ranks, store):
            run_training(Run(folder, name), flags, changes)


def run_training(run: Run, flags: list[str], changes: list[Change]) -> None:
    from megatron.zero_bubble.session.reports import print_rank_0
    from megatron.zero_bubble.session.session import Session
    from megatron.zero_bubble.trainer.arguments import parse_arguments
    from megatron.zero_bubble.trainer.checks import complete_and_check
    from megatron.zero_bubble.trainer.pretrain import pretrain
    from tests.undone import counted_undos

    args, job = complete_and_check(parse_arguments(flags), os.environ, torch.cuda.is_available())
    print_rank_0(f"training {run.name}")
    with counted_undos() as undone, contextlib.ExitStack() as changed:
        for change in changes:
            changed.enter_context(change.applied(run))
        pretrain(args, Session(job, "pretrain_gpt.py"))
    counts = [0] * args.world_size
    dist.all_gather_object(counts, undone())
    print_rank_0(f"undone steps of each rank: {counts}")
