"""Under hierarchical SGD, a script prints and records losses that are averaged over the replicas."""

from __future__ import annotations

from argparse import Namespace
from inspect import signature

import pytest
import torch

from megatron.zero_bubble.launcher import script_steps
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.script_steps import ScriptReplicas


@pytest.mark.parametrize(
    ("writer", "iteration", "loss", "total"),
    [
        ({"tensorboard_dir": "events"}, 3, 1.0, 4.0),
        ({"tensorboard_dir": "events"}, 4, 2.0, 4.0),
        ({"wandb_project": "gpt"}, 4, 2.0, 4.0),
        ({}, 4, 1.0, 4.0),
        ({}, 10, 2.0, 5.0),
    ],
)
def test_losses_are_averaged_before_they_are_printed_or_recorded(monkeypatch, writer, iteration, loss, total):
    logged = []

    def training_log(loss_dict, total_loss_dict, iteration):
        logged.append((loss_dict["lm loss"].item(), total_loss_dict["lm loss"].item()))

    monkeypatch.setattr(script_steps, "_mean_over_replicas", lambda value: value + 1)
    script = Namespace(log_interval=10, tensorboard_log_interval=2, **writer)
    session = Namespace(job=Namespace(hierarchy=None), replicas=Namespace(is_local=True))
    losses, sums = {"lm loss": torch.tensor(1.0)}, {"lm loss": torch.tensor(4.0)}
    call = Call(training_log, signature(training_log).bind(losses, sums, iteration))
    ScriptReplicas(script, session).average_logged_losses(call)
    assert logged == [(loss, total)]
