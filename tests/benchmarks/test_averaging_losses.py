"""Synchronous and hierarchical SGD are trained with the same flags but for those of the method, and compared."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import averaging_losses
from benchmarks.averaging_losses import main
from tests.launch import TINY_GPT

TWO = ["--num-ranks", "2", "--hierarchical-sgd", "2:2", "--hierarchical-lr", "2e-2"]
TRAINING = ["--", *TINY_GPT, "--lr", "1e-2", "--log-interval", "2"]
VALIDATION = " validation loss at iteration 4 | lm loss value: {} | lm loss PPL: 1.0E+00 | \n"


def a_log(*losses: float) -> str:
    """What a training prints that logs every second iteration, and evaluates at the end with the last loss."""
    lines = [f" iteration {2 * k:8d}/       4 | lm loss: {loss:.6E} |\n" for k, loss in enumerate(losses, 1)]
    return "".join(lines) + VALIDATION.format(f"{losses[-1]:.6E}")


@pytest.fixture
def commands(monkeypatch):
    """The commands of both trainings, of which the second one ends 2.5% above the first."""
    started: list[list[str]] = []

    def run(command, **_options):
        started.append(command)
        log = a_log(6.0, 4.1) if "--hierarchical-sgd" in command else a_log(6.0, 4.0)
        return subprocess.CompletedProcess(command, 0, stdout=log, stderr="")

    monkeypatch.setattr(averaging_losses.subprocess, "run", run)
    return started


def test_the_learning_rate_is_that_of_the_hierarchical_training_alone(commands):
    main([*TWO, *TRAINING])
    synchronous, hierarchical = commands
    assert hierarchical == [*synchronous, "--hierarchical-sgd", "2:2", "--lr", "0.02"]
    assert synchronous[-len(TRAINING) + 1 :] == TRAINING[1:]


@pytest.mark.parametrize(("tolerance", "status"), [("0.024", 1), ("0.026", 0)])
def test_the_status_says_whether_the_last_losses_are_within_the_tolerance(commands, capsys, tolerance, status):
    assert main([*TWO, "--tolerance", tolerance, *TRAINING]) == status
    assert capsys.readouterr().out == (
        "SGD               last loss  validation\n"
        "synchronous          4.0000      4.0000\n"
        "hierarchical 2:2     4.1000      4.1000\n"
        "difference of the last loss: +2.50%\n"
    )


@pytest.mark.exhaustive  # two trainings; end_to_end/test_hierarchical_sgd.py has what hierarchical SGD computes
def test_both_trainings_run(capsys):
    main([*TWO, "--tolerance", "1", "--json", *TRAINING, "--train-iters", "4"])
    losses = json.loads(capsys.readouterr().out)
    assert [iteration for iteration, _ in losses["synchronous"]["training"]] == [2, 4]
    assert losses["hierarchical 2:2"]["training"] != losses["synchronous"]["training"]
