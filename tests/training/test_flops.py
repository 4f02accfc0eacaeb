from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.zero_bubble.training.flops import flops_per_iteration


def model(**changes: int | bool | None) -> SimpleNamespace:
    """The flags that count; a model small enough to be counted by hand."""
    flags = {
        "num_layers": 2, "hidden_size": 10, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 5,
        "ffn_hidden_size": 40, "swiglu": False, "seq_length": 8, "padded_vocab_size": 100, "num_experts": None,
        "moe_router_topk": 2, "mtp_num_layers": None, "hybrid_layer_pattern": None,
    }  # fmt: skip
    return SimpleNamespace(**{**flags, **changes})


# Multiplications and additions of one token in one forward.
QKV_AND_OUTPUT = 2 * (10 * 30 + 10 * 10)
ATTENTION = 2 * (10 * 4 + 10 * 4)  # scores, then values: with a causal mask a token sees half of 8 on average
MLP = 2 * (10 * 40 + 40 * 10)
LOGITS = 2 * (10 * 100)
JOINING = 2 * (20 * 10)  # the hidden state and the embedding of a further token, to one hidden state


def count(per_layer: int, *, num_layers: int = 2, beside: int = LOGITS) -> int:
    """Forward, B and W of 8 tokens in each of 3 sequences."""
    return 3 * 8 * 3 * (num_layers * per_layer + beside)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (model(), count(QKV_AND_OUTPUT + ATTENTION + MLP)),
        (model(num_layers=5), count(QKV_AND_OUTPUT + ATTENTION + MLP, num_layers=5)),
        (model(num_query_groups=1), count(2 * (10 * (10 + 5 + 5) + 10 * 10) + ATTENTION + MLP)),
        (model(kv_channels=10), count(2 * QKV_AND_OUTPUT + 2 * ATTENTION + MLP)),
        (model(swiglu=True, ffn_hidden_size=30), count(QKV_AND_OUTPUT + ATTENTION + 2 * (2 * 10 * 30 + 30 * 10))),
        (model(num_experts=8), count(QKV_AND_OUTPUT + ATTENTION + 2 * MLP)),
        (
            model(mtp_num_layers=2),
            count(QKV_AND_OUTPUT + ATTENTION + MLP, num_layers=2 + 2, beside=3 * LOGITS + 2 * JOINING),
        ),
        (
            model(num_layers=4, hybrid_layer_pattern="*-|*E", num_experts=8),
            count(0, beside=2 * (QKV_AND_OUTPUT + ATTENTION) + MLP + 2 * MLP + LOGITS),
        ),
    ],
    ids=["gpt", "layers", "shared keys and values", "wide heads", "swiglu", "experts", "further tokens", "hybrid"],
)
def test_operations_are_those_that_were_counted_by_hand(args, expected):
    assert flops_per_iteration(args, batch_size=3) == expected


def test_the_published_formula():
    """72 B s l h^2 (1 + s/(6h) + V/(12 l h)) of Narayanan et al. 2021, not recomputed; the mask halves s/(6h)."""
    batch, s, layers, h, vocabulary = 1536, 2048, 96, 12288, 51200
    args = model(
        num_layers=layers, hidden_size=h, num_attention_heads=96, num_query_groups=96, kv_channels=128,
        ffn_hidden_size=4 * h, seq_length=s, padded_vocab_size=vocabulary,
    )  # fmt: skip
    published = 72 * batch * s * layers * h**2 * (1 + s / (12 * h) + vocabulary / (12 * layers * h))
    assert flops_per_iteration(args, batch) == pytest.approx(published, rel=1e-12)
