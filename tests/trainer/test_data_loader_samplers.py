"""Which samples a rank reads, and that a resumed run reads the rest."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.trainer.data_loader import sample_indices


def test_a_sequential_rank_takes_its_part_of_every_stride_and_drops_an_incomplete_one() -> None:
    assert list(sample_indices(11, 0, 2, 0, 2)) == [[0, 1], [4, 5]]
    assert list(sample_indices(11, 0, 2, 1, 2)) == [[2, 3], [6, 7]]


def test_a_sequential_run_that_used_all_samples_gets_no_more() -> None:
    assert list(sample_indices(8, 8, 2, 0, 2)) == []


@pytest.mark.parametrize(("total", "micro_batch_size", "ranks"), [(12, 2, 3), (37, 3, 2), (16, 1, 4), (5, 5, 1)])
def test_the_ranks_share_the_data_without_gap_or_overlap(total: int, micro_batch_size: int, ranks: int) -> None:
    strides = total // (micro_batch_size * ranks)
    seen: list[int] = []
    for rank in range(ranks):
        for microbatch in sample_indices(total, 0, micro_batch_size, rank, ranks):
            assert len(microbatch) == micro_batch_size
            seen += microbatch
    assert len(seen) == len(set(seen)) == strides * micro_batch_size * ranks
    assert set(seen) <= set(range(total))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps_done", [0, 1, 4, 9, 10])
def test_a_resumed_run_sees_the_tail_of_an_uninterrupted_one(rank: int, steps_done: int) -> None:
    """41 samples in strides of 4: 10 steps, and one sample that does not fit."""
    uninterrupted = list(sample_indices(41, 0, 2, rank, 2))
    resumed = list(sample_indices(41, steps_done * 4, 2, rank, 2))
    assert resumed == uninterrupted[steps_done:]
