"""Which samples a rank reads, and that a resumed run reads the rest."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from megatron.zero_bubble.trainer.data_loader import CyclicSampler, SequentialSampler

SAMPLERS = [SequentialSampler, CyclicSampler]


def test_a_sequential_rank_takes_its_part_of_every_stride_and_drops_an_incomplete_one() -> None:
    assert list(SequentialSampler(11, 0, 2, 0, 2)) == [[0, 1], [4, 5]]
    assert list(SequentialSampler(11, 0, 2, 1, 2)) == [[2, 3], [6, 7]]


def test_a_sequential_run_that_used_all_samples_gets_no_more() -> None:
    assert list(SequentialSampler(8, 8, 2, 0, 2)) == []


def test_a_cyclic_epoch_is_a_permutation_seeded_by_its_number() -> None:
    shard = [3, 4, 5]  # of rank 1: 6 of 7 samples are used, half of them by each rank
    epochs = []
    for epoch in range(3):
        order = torch.randperm(3, generator=torch.Generator().manual_seed(epoch)).tolist()
        epochs += [[shard[index]] for index in order]
    assert list(islice(CyclicSampler(7, 0, 1, 1, 2), 9)) == epochs


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("total", "micro_batch_size", "ranks"), [(12, 2, 3), (37, 3, 2), (16, 1, 4), (5, 5, 1)])
def test_the_ranks_share_an_epoch_without_gap_or_overlap(
    sampler: type, total: int, micro_batch_size: int, ranks: int
) -> None:
    strides = total // (micro_batch_size * ranks)
    seen: list[int] = []
    for rank in range(ranks):
        for microbatch in islice(sampler(total, 0, micro_batch_size, rank, ranks), strides):
            assert len(microbatch) == micro_batch_size
            seen += microbatch
    assert len(seen) == len(set(seen)) == strides * micro_batch_size * ranks
    assert set(seen) <= set(range(total))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps_done", [0, 1, 4, 9, 10, 13])
def test_a_resumed_run_sees_the_tail_of_an_uninterrupted_one(sampler: type, rank: int, steps_done: int) -> None:
    """41 samples in strides of 4: 10 steps an epoch, and one sample that does not fit."""
    uninterrupted = list(islice(sampler(41, 0, 2, rank, 2), 25))
    resumed = list(islice(sampler(41, steps_done * 4, 2, rank, 2), 25 - steps_done))
    assert resumed == uninterrupted[steps_done:]


def test_cyclic_sampling_of_less_than_one_stride_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 samples, fewer than --micro-batch-size 2 x data-parallel size 2"):
        CyclicSampler(3, 0, 2, 0, 2)


def test_cyclic_sampling_cannot_resume_inside_a_stride() -> None:
    with pytest.raises(ValueError, match=r"6 consumed samples are not a multiple of --micro-batch-size 2 x"):
        CyclicSampler(100, 6, 2, 0, 2)
