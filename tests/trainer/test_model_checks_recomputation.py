"""Recomputation that megatron-core would hang in, or end in a traceback, is refused in one line before it starts."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.trainer import model_checks
from tests.checked_flags import checked

SELECTIVE = {"--recompute-granularity": "selective"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--recompute-activations": None, "--recompute-granularity": "full"},
            "--recompute-activations is --recompute-granularity selective, but full is given",
        ),
        (
            SELECTIVE | {"--recompute-modules": "core_attn mlp"},
            "--recompute-modules mlp needs --disable-bias-linear: megatron-core hangs with biases",
        ),
        (
            {"--recompute-activations": None, "--recompute-modules": "core_attn layernorm"},
            "--recompute-modules layernorm needs the package transformer_engine: leave layernorm out, or use "
            "--recompute-granularity full",
        ),
    ],
)
def test_what_megatron_core_cannot_recompute(changes, message, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_checks, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        checked(changes)
    assert str(error.value) == message


def test_modules_that_are_recomputed(monkeypatch: pytest.MonkeyPatch):
    checked({"--recompute-modules": "mlp layernorm"})  # without selective recomputation they have no effect
    checked(SELECTIVE | {"--recompute-modules": "mlp moe shared_experts core_attn", "--disable-bias-linear": None})
    monkeypatch.setattr(model_checks, "find_spec", lambda package: object())
    checked(SELECTIVE | {"--recompute-modules": "layernorm"})
