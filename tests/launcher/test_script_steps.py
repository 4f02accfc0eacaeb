"""A script's optimizer steps: losses averaged under hierarchical SGD, and the loop that post-validation needs."""

from __future__ import annotations

from argparse import Namespace
from inspect import signature

import pytest
import torch

from megatron.zero_bubble.launcher import script_steps
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.script_steps import ScriptReplicas, iterations_done
from megatron.zero_bubble.session.start_up import SessionError


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


def session_with(**settings: object) -> Namespace:
    flags = Namespace(zero_bubble_post_validation=False, hierarchical_sgd=None)
    vars(flags).update(settings)
    return Namespace(job=Namespace(flags=flags), iteration=7)


def test_the_number_of_an_iteration_is_the_scripts_or_the_sessions():
    """Megatron-LM's loop sets `curr_iteration`; loops such as slime's, and evaluations before training, do not."""
    assert iterations_done(Namespace(curr_iteration=3), session_with(), trains=True) == 3
    assert iterations_done(Namespace(), session_with(), trains=True) == 7
    assert iterations_done(Namespace(), session_with(zero_bubble_post_validation=True), trains=False) == 7


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"zero_bubble_post_validation": True}, "--zero-bubble-post-validation works with Megatron-LM's trainer alone"),
        ({"hierarchical_sgd": "2:2"}, "--hierarchical-sgd works with Megatron-LM's trainer alone"),
    ],
)
def test_settings_that_megatron_lms_loop_serves_are_refused_in_another_loop(settings, line):
    with pytest.raises(SessionError, match=line):
        iterations_done(Namespace(), session_with(**settings), trains=True)
