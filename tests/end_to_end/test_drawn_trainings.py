"""Models that nobody chose: trainings drawn at random compute what they compute under megatron-core's own schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drawn_trainings import drawn_training, equals_megatron_cores

SEEDS = (7, 12, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(100, 120)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_training_equals_megatron_cores(seed: int, tmp_path: Path) -> None:
    training = drawn_training(seed)
    assert equals_megatron_cores(training, tmp_path), " ".join((*training.flags, *training.ours))
