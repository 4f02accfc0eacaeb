"""The time limit counts from the start of the program, as Megatron-LM's."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.zero_bubble.trainer.exit_reasons import ExitReasons
from tests.checked_flags import checked


@pytest.mark.usefixtures("one_rank")
def test_minutes_before_training_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reasons = ExitReasons(checked({"--exit-duration-in-mins": "2"}))
    now += 119.0  # the model is built and the checkpoint loaded
    assert reasons.reason(1, waits=True) is None
    now += 2.0
    assert reasons.reason(2, waits=False) is None, "this iteration's votes decide after the next one"
    assert reasons.reason(3, waits=False) == "--exit-duration-in-mins 2.0"
