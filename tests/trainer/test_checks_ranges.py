"""A number out of the range of its flag is refused in one line that names the range."""

from __future__ import annotations

import pytest

from tests.checked_flags import refusal

AT_LEAST_ONE = """
num-layers hidden-size num-attention-heads seq-length micro-batch-size max-position-embeddings ffn-hidden-size
kv-channels make-vocab-size-divisible-by num-query-groups tensor-model-parallel-size pipeline-model-parallel-size
train-iters global-batch-size seed log-interval eval-interval save-interval exit-interval
distributed-timeout-minutes vocab-size ddp-bucket-size lr-decay-iters recompute-num-layers
num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank
microbatch-group-size-per-virtual-pipeline-stage num-distributed-optimizer-instances
"""
NOT_NEGATIVE = "lr min-lr weight-decay clip-grad init-method-std exit-duration-in-mins"
POSITIVE = "norm-epsilon adam-eps"
FRACTION = "attention-dropout hidden-dropout adam-beta1 adam-beta2"


@pytest.mark.parametrize(
    ("name", "value", "expectation"),
    [
        *[(name, value, "must be at least 1") for name in AT_LEAST_ONE.split() for value in ("0", "-3")],
        *[(name, value, "must be at least 0") for name in NOT_NEGATIVE.split() for value in ("-0.5", "nan", "inf")],
        *[(name, "-1", "must be at least 0") for name in ("eval-iters", "num-workers", "lr-warmup-iters")],
        *[(name, value, "must be above 0") for name in POSITIVE.split() for value in ("0.0", "-1.0", "nan")],
        *[(name, value, "must be in [0, 1)") for name in FRACTION.split() for value in ("1.0", "-0.1", "nan")],
        *[("rotary-percent", value, "must be in (0, 1]") for value in ("0.0", "1.5", "nan")],
        ("rotary-base", "0", "must be above 0"),
        ("timing-log-level", "3", "must be 0, 1 or 2"),
        ("empty-unused-memory-level", "3", "must be 0, 1 or 2"),
    ],
)
def test_a_value_out_of_range(name, value, expectation):
    assert refusal({f"--{name}": value}) == f"--{name} {expectation}, got {value}"
