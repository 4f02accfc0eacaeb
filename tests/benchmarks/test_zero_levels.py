"""Real trainings hold and send what the table of ZeRO says, to 5%."""

from __future__ import annotations

import pytest

from benchmarks.zero_levels import LEVELS, LevelFlags, expectation, measure


@pytest.mark.exhaustive  # four ranks train six times; the formulas are tested by test_model_states.py
def test_memory_and_volume_are_within_5_percent_of_the_table() -> None:
    """Memory is that after a step, without what ZeRO-2 and ZeRO-3 gather within it."""
    flags = LevelFlags()
    measured = measure(flags)
    for level in LEVELS:
        expected = expectation(level, flags)
        assert measured[level].passes == pytest.approx(expected["passes"], rel=0.05)
        assert measured[level].sent == pytest.approx(expected["sent"], rel=0.05)
        if level in ("0", "1", "2", "3"):
            assert measured[level].passes == pytest.approx(expected["known_passes"], rel=0.05)
        if level in ("0", "1", "3"):
            assert measured[level].after_step == pytest.approx(expected["known_bytes"], rel=0.05)
