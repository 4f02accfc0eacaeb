"""Batch sizes that change by steps: those of a ramp, and those of Megatron-LM's flag."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator

from megatron.zero_bubble.mcore.batch_sizes import has_steps, ramp_as_steps, sizes_of_steps

RAMPS = hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")


@pytest.mark.skipif(not RAMPS, reason="megatron-core has no ramp from 0.18 on")
@given(start=st.integers(1, 8), increment=st.integers(1, 8), num_steps=st.integers(1, 12), samples=st.integers(1, 200))
def test_steps_have_the_sizes_of_a_ramp(start: int, increment: int, num_steps: int, samples: int) -> None:
    largest = start + increment * num_steps
    ramp = num_microbatches_calculator.RampupBatchsizeNumMicroBatchesCalculator(
        largest, 1, 1, False, 1, start, increment, samples
    )
    text = ramp_as_steps((start, increment, samples), largest)
    steps = [tuple(map(int, entry.split(":"))) for entry in text.split()]
    for consumed in range(samples + 3):
        ramp.update(consumed, False)
        assert [size for threshold, size in steps if threshold <= consumed][-1] == ramp.current_global_batch_size


def test_steps_have_rising_thresholds_from_zero() -> None:
    """megatron-core demands it; a ramp of more steps than sequences leaves steps out."""
    assert ramp_as_steps((2, 2, 20), 8) == "0:2 7:4 14:6 20:8"
    assert ramp_as_steps((1, 1, 1), 4) == "0:1 1:4"


def test_the_sizes_of_megatron_lms_flag_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Steps:
        """Stands in for megatron-core's class, which 0.18 has and 0.16 has not."""

        @classmethod
        def _parse_schedule(cls, text: str, seq_length: int | None) -> list[tuple[int, int]]:
            if ":" not in text:
                raise ValueError("no pair")
            pairs: list[Any] = [entry.split(":") for entry in text.split()]
            return [(int(threshold) // (seq_length or 1), int(size)) for threshold, size in pairs]

    monkeypatch.setattr(num_microbatches_calculator, "StepBatchsizeNumMicroBatchesCalculator", Steps, raising=False)
    assert has_steps()
    assert sizes_of_steps("0:8 64:16 128:4 256:16") == (4, 8, 16)
    with pytest.raises(ValueError, match=r"^--step-batch-size-schedule x: no pair$"):
        sizes_of_steps("x")
