"""Averages over replicas, in real process groups."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime import group_averager
from megatron.zero_bubble.runtime.group_averager import average, groups_of_replicas
from tests.ranks import run_on_ranks
from tests.trainings import process_group


def average_in_parts(rank: int, num_ranks: int, port: int) -> None:
    """Average three tensors of which only two are averaged at once; an assertion that fails fails the test."""
    group_averager._ELEMENTS_AT_ONCE = 4
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)):
        groups = groups_of_replicas([range(num_ranks)], [num_ranks], timedelta(seconds=60))
        for _ in range(2):
            tensors = [torch.full((2,), float(number + rank)) for number in range(3)]
            average(tensors, groups[num_ranks])
            assert [tensor.tolist() for tensor in tensors] == [[number + 0.5] * 2 for number in range(3)]


def test_parameters_of_several_parts_are_averaged():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, average_in_parts, (store.port,), timeout=60) == 0
