"""The floating-point operations of a sequence: counted by hand, and as published."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.trainer.model_count import flops_of_sequence
from tests.trainer.counted_job import GROUPED, arguments

# Multiplications and additions of one token in one forward, with hidden size 48 and 4 heads.
QKV_AND_OUTPUT = 2 * (48 * 144 + 48 * 48)
ATTENTION = 2 * (48 * 32 + 48 * 32)  # scores, then values: with a causal mask a token sees half of 64 on average
MLP = 2 * (48 * 192 + 192 * 48)
LOGITS = 2 * (48 * 384)
JOINING = 2 * (96 * 48)  # the hidden state and the embedding of a further token, to one hidden state


def count(per_layer: int, *, num_layers: int = 2, beside: int = LOGITS) -> int:
    """Forward, B and W of 64 tokens."""
    return 3 * 64 * (num_layers * per_layer + beside)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", count(QKV_AND_OUTPUT + ATTENTION + MLP)),
        ("--num-layers 6", count(QKV_AND_OUTPUT + ATTENTION + MLP, num_layers=6)),
        (GROUPED, count(2 * (48 * (48 + 24 + 24) + 48 * 48) + ATTENTION + MLP)),
        ("--kv-channels 24", count(2 * QKV_AND_OUTPUT + 2 * ATTENTION + MLP)),
        ("--swiglu --ffn-hidden-size 96", count(QKV_AND_OUTPUT + ATTENTION + 2 * (2 * 48 * 96 + 96 * 48))),
        (
            "--num-experts 8 --disable-bias-linear",
            count(QKV_AND_OUTPUT + ATTENTION + 2 * MLP + 2 * 48 * 8),
        ),
        (
            "--num-experts 8 --disable-bias-linear --moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 48",
            count(2 * QKV_AND_OUTPUT + 2 * ATTENTION + 3 * MLP + 2 * (48 * 48 * 2) + 2 * 48 * 8, num_layers=1),
        ),
        (
            "--mtp-num-layers 2",
            count(QKV_AND_OUTPUT + ATTENTION + MLP, num_layers=2 + 2, beside=3 * LOGITS + 2 * JOINING),
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64",
            count(QKV_AND_OUTPUT + ATTENTION + MLP),
        ),
    ],
)
def test_operations_of_a_sequence_are_those_that_were_counted_by_hand(flags: str, expected: int) -> None:
    assert flops_of_sequence(arguments(flags, 4)) == expected


def test_the_published_formula() -> None:
    """72 B s l h^2 (1 + s/(6h) + V/(12 l h)) of Narayanan et al. 2021, not recomputed; the mask halves s/(6h)."""
    s, layers, h, vocabulary = 2048, 96, 12288, 51200
    sizes = f"--num-layers {layers} --hidden-size {h} --num-attention-heads 96 --seq-length {s}"
    args = arguments(f"{sizes} --vocab-size {vocabulary - 1} --make-vocab-size-divisible-by 1 --micro-batch-size 1")
    published = 72 * s * layers * h**2 * (1 + s / (12 * h) + vocabulary / (12 * layers * h))
    assert flops_of_sequence(args) == pytest.approx(published, rel=1e-12)
