"""Going on with another learning rate, or without what the checkpoint has besides the model.

`make test` goes on in each way that a learning rate can. The exhaustive trainings take one of them by other flags.
"""

from __future__ import annotations

import re

import pytest

from tests.launch import TINY_GPT
from tests.trainings import Trainings

IN_MAKE_TEST = ("same", "checkpoint", "flags", "another optimizer", "model alone")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Two iterations of eight, saved, and from there to the fourth with other flags."""
    root = tmp_path_factory.mktemp("schedule")
    base = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4", "--zero-bubble"]
    base += ["--zero-bubble-keep-layout"]  # saves the rehearsal of other layouts
    base += ["--lr-decay-iters", "8", "--train-iters", "4"]
    load = [*base, "--load", str(root / "checkpoints")]
    lower = [*load, "--lr", "5e-3", "--min-lr", "1e-3", "--weight-decay", "0.1"]
    flags = {
        "saved": [*base, "--exit-interval", "2", "--save", str(root / "checkpoints")],
        "same": load,
        "flags": [*lower, "--override-opt-param-scheduler"],
        "flags, as Megatron-LM spells it": [*lower, "--override-opt_param-scheduler"],
        "flags, a new optimizer": [*lower, "--override-opt-param-scheduler", "--no-load-optim"],
        "checkpoint": [*lower, "--use-checkpoint-opt-param-scheduler"],
        "checkpoint, a new optimizer": [*lower, "--use-checkpoint-opt-param-scheduler", "--no-load-optim"],
        "another precision": [*load, "--bf16", "--no-load-optim"],
        "another optimizer": [*load, "--optimizer", "sgd", "--no-load-optim"],
        **{
            name: [*base, "--decoupled-lr", "0.05", "--use-distributed-optimizer", *flags]
            for name, flags in {
                "decoupled": [],
                "decoupled, saved": ["--exit-interval", "2", "--save", str(root / "decoupled")],
                "decoupled, resumed": ["--load", str(root / "decoupled")],
            }.items()
        },
        "model alone": [*lower, "--bf16", "--finetune"],
    }
    return Trainings(2, flags, root)


def rates(trainings: Trainings, name: str) -> dict[int, float]:
    """The learning rate after each iteration."""
    trainings.run("saved", name)
    found = re.findall(r"iteration +(\d+)/.* learning rate: (\S+)", trainings.printed(name))
    return {int(iteration): float(rate) for iteration, rate in found}


def ways(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.exhaustive) for name in names]
    )


@ways("same", "checkpoint")
def test_the_checkpoints_schedule_goes_on(trainings: Trainings, name: str) -> None:
    assert rates(trainings, name) == pytest.approx({3: 0.01 * 5 / 8, 4: 0.01 * 4 / 8})


@ways("flags", "flags, as Megatron-LM spells it")
def test_the_flags_schedule_takes_its_place(trainings: Trainings, name: str) -> None:
    """The flags' bounds hold, although the optimizer's state brings back those of the checkpoint."""
    assert rates(trainings, name) == pytest.approx({3: 1e-3 + 4e-3 * 5 / 8, 4: 1e-3 + 4e-3 * 4 / 8})


@ways("another precision", "another optimizer")
def test_without_the_optimizers_state_the_schedule_begins_anew(trainings: Trainings, name: str) -> None:
    assert rates(trainings, name) == pytest.approx({3: 0.01 * 7 / 8, 4: 0.01 * 6 / 8})


@ways("flags, a new optimizer", "checkpoint, a new optimizer")
def test_without_the_optimizers_state_the_flags_schedule_begins_anew(trainings: Trainings, name: str) -> None:
    """Like Megatron-LM, the trainer does not load the checkpoint's schedule without the optimizer's state."""
    assert rates(trainings, name) == pytest.approx({3: 1e-3 + 4e-3 * 7 / 8, 4: 1e-3 + 4e-3 * 6 / 8})


def test_the_model_alone_begins_anew(trainings: Trainings) -> None:
    assert rates(trainings, "model alone") == pytest.approx({n: 1e-3 + 4e-3 * (8 - n) / 8 for n in range(1, 5)})


def test_a_rate_of_the_embedding_goes_on(trainings: Trainings) -> None:
    trainings.run("decoupled", "decoupled, saved", "decoupled, resumed")
    whole, resumed = (trainings.numerics(name).splitlines() for name in ("decoupled", "decoupled, resumed"))
    assert resumed == whole[2:]
