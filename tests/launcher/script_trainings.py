"""Runs trainings of the script in `checkout` in the ranks of `tests.ranks`, each when a test first asks for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron.zero_bubble as zb
from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.launch import Launch
from tests.changes import Change, NoStepWaits, Run
from tests.launch import ROOT
from tests.ranks import be_rank, run_on_ranks
from tests.trainings import process_group
from tests.undone import counted_undos

CHECKOUT = ROOT / "tests" / "launcher" / "checkout"


@dataclass(frozen=True)
class Training:
    """One training of the script."""

    settings: Mapping[str, Any] | None
    """The keywords of `enable`; None for a training without `enable`, with megatron-core's own schedule."""
    flags: tuple[str, ...]
    saves: bool = False
    """Whether the training saves a checkpoint at its end."""
    loads: str | None = None
    """The name of the training from whose checkpoint this one goes on."""
    change: Change | None = None


class ScriptTrainings:
    """Trainings by name, each of which runs when a test first asks for it."""

    def __init__(self, num_ranks: int, trainings: Mapping[str, Training], folder: Path) -> None:
        self.folder = folder
        self._num_ranks, self._trainings = num_ranks, trainings
        self._done: set[str] = set()

    def run(self, *names: str) -> None:
        """Run the trainings that have not run yet, in this order; first those whose checkpoints they load."""
        for name in names:
            loads = self._trainings[name].loads
            if loads is not None:
                self.run(loads)
            if name not in self._done:
                self._run(name)
                self._done.add(name)

    def _run(self, name: str) -> None:
        if self._trainings[name].saves:
            (self.folder / name).mkdir(exist_ok=True)
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        arguments = (Run(self.folder, name), self._trainings[name], store.port)
        status = run_on_ranks(self._num_ranks, run_rank, arguments, timeout=300)
        assert status == 0, f"{name}: status {status}: {(self.folder / f'{name}.errors').read_text()[-6000:]}"

    def log(self, name: str, rank: int | None = None) -> str:
        """The lines that a rank printed; by default the last rank, which prints the log line of each iteration."""
        return self._file(name, self._num_ranks - 1 if rank is None else rank, "txt").read_text()

    def numbers(self, name: str) -> list[str]:
        return numbers(self.log(name))

    def losses(self, name: str) -> list[str]:
        """The loss of every iteration and the validation loss, to the last bit."""
        return re.findall(r"lm loss(?: value)?: (\S+)", self.log(name))

    def costs(self, name: str, rank: int) -> dict[str, Any]:
        """The costs that `MeasuredCosts` wrote."""
        return json.loads(self._file(name, rank, "costs").read_text())

    def layers(self, name: str, rank: int) -> list[int]:
        """The number of layers of each model chunk that the script built on a rank."""
        return json.loads(self._file(name, rank, "layers").read_text())

    def undone(self, name: str) -> int:
        """The number of optimizer steps that all ranks have undone."""
        return sum(int(self._file(name, rank, "undone").read_text()) for rank in range(self._num_ranks))

    def _file(self, name: str, rank: int, kind: str) -> Path:
        self.run(name)
        return self.folder / f"{name}.{rank}.{kind}"


def numbers(log: str) -> list[str]:
    """Loss and gradient norm of every iteration, and the validation loss, to the last bit."""
    return re.findall(r"(?:lm loss|grad norm|lm loss value): (\S+)", log)


class MeasuredCosts(Change):
    """The costs that are measured before the script builds its model are written to `NAME.RANK.costs`."""

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.zero_bubble.session import session

        costs_of_units = session.costs_of_units

        def measure_and_write(*args: Any) -> Any:
            costs = costs_of_units(*args)
            (run.folder / f"{run.name}.{dist.get_rank()}.costs").write_text(json.dumps(asdict(costs)))
            return costs

        with mock.patch.object(session, "costs_of_units", measure_and_write):
            yield


def run_rank(rank: int, num_ranks: int, run: Run, training: Training, port: int) -> None:
    """Be one rank of a training.

    Args:
        port: of this machine, where the store is in which the ranks meet.
    """
    be_rank(rank, num_ranks)
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    with (run.folder / f"{run.name}.errors").open("a") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)):
        run_training(rank, run, training)


def run_training(rank: int, run: Run, training: Training) -> None:
    """Train, and write the numbers of layers built and of steps undone."""
    with enabled(training.settings), counted_undos() as undone, contextlib.ExitStack() as changed:
        if training.change is not None:
            changed.enter_context(training.change.applied(run))
        train(run, training)
        layers = [len(chunk.module.decoder.layers) for chunk in chunks_built()]
    (run.folder / f"{run.name}.{rank}.layers").write_text(json.dumps(layers))
    (run.folder / f"{run.name}.{rank}.undone").write_text(str(undone()))


class TorchsMuon(NoStepWaits):
    """megatron-core's chain of Muon and Adam has torch's Muon: the package with NVIDIA's is not on PyPI."""

    @contextlib.contextmanager
    def applied(self, run: Run) -> Iterator[None]:
        from megatron.core.optimizer import muon

        def make(groups: Any, lr: float, momentum_beta: float, weight_decay: float, **other: Any) -> Any:
            return torch.optim.Muon(groups, lr=lr, momentum=momentum_beta, weight_decay=weight_decay)

        with super().applied(run), mock.patch.multiple(muon, HAVE_EMERGING_OPTIMIZERS=True, TensorParallelMuon=make):
            yield


@contextlib.contextmanager
def enabled(settings: Mapping[str, Any] | None) -> Iterator[None]:
    """Within, zero bubble is enabled with these settings; with None there are only the substitutions for a CPU."""
    if settings is None:
        launch = Launch(LaunchFlags(zero_bubble_cpu=True))
        yield
        launch.close()
    else:
        zb.enable(**settings, cpu=True)
        yield
        zb.disable()


def chunks_built() -> list[Any]:
    """The model chunks that the script has built on this rank under a schedule of ours."""
    launch = Launch.enabled
    return [] if launch is None or launch.script_hooks is None else launch.script_hooks.run._chunks


def train(run: Run, training: Training) -> None:
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.training import pretrain
    from pretrain_small import data_provider, forward_step, model_provider

    flags = ["--num-workers", "0", *training.flags]
    if training.saves:
        flags += ["--save", str(run.folder / run.name)]
    if training.loads is not None:
        flags += ["--load", str(run.folder / training.loads)]
    with (run.folder / f"{run.name}.{dist.get_rank()}.txt").open("w") as file, contextlib.redirect_stdout(file):
        pretrain(model_provider, forward_step, data_provider, flags)
    mpu.destroy_model_parallel()
    unset_num_microbatches_calculator()
