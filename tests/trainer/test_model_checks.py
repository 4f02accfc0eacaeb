"""Models at whose first forward megatron-core would fail are refused in one line, before any process group exists."""

from __future__ import annotations

import pytest

from tests.checked_flags import checked, refusal

EXPERTS = {"--num-experts": "4", "--disable-bias-linear": None}
SINKHORN = {**EXPERTS, "--moe-router-load-balancing-type": "sinkhorn"}
ON_INPUT = {**EXPERTS, "--moe-apply-probs-on-input": None}
MISTAKES = {
    "prediction layers, and layers without positions": (
        {"--position-embedding-type": "rope", "--no-rope-freq": "2", "--mtp-num-layers": "1"},
        "--no-rope-freq 2 with --mtp-num-layers 1: megatron-core's list of layers without positions has no entry for "
        "prediction layers: give one of them",
    ),
    "Sinkhorn's routes with a loss": (
        {**SINKHORN, "--moe-aux-loss-coeff": "0.01"},
        "--moe-aux-loss-coeff with --moe-router-load-balancing-type sinkhorn: megatron-core balances Sinkhorn's "
        "routes without a loss: leave the coefficient out",
    ),
    "the probabilities of several experts on one input": (
        {**ON_INPUT, "--moe-router-topk": "2"},
        "--moe-apply-probs-on-input needs --moe-router-topk 1, got 2: each of several experts would need an input of "
        "its own",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_that_names_flags_and_values(changes: dict[str, str | None], message: str) -> None:
    assert refusal(changes) == message


@pytest.mark.parametrize("changes", [{**SINKHORN}, {**ON_INPUT, "--moe-router-topk": "1"}])
def test_experts_that_megatron_core_trains(changes: dict[str, str | None]) -> None:
    assert checked(changes).num_experts == 4
