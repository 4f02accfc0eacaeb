"""Gradients are averaged over replicas, in real process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.zero_bubble.pipeline.gradients import average_over
from tests.ranks import run_on_ranks
from tests.trainings import process_group


def average_gradients(rank: int, num_ranks: int, port: int) -> None:
    """Average the gradients of four parameters; an assertion that fails fails the test."""
    with process_group(rank, num_ranks, dist.TCPStore("localhost", port)):
        parameters = [torch.nn.Parameter(torch.ones(2), requires_grad=number != 3) for number in range(4)]
        parameters[0].grad = torch.full((2,), float(rank))
        if rank == 1:
            parameters[1].grad = torch.full((2,), 4.0)
        average_over(dist.group.WORLD, parameters)
        found = [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]
        assert found == [[0.5, 0.5], [2.0, 2.0], None, None]


def test_a_parameter_without_a_gradient_on_any_replica_keeps_none():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert run_on_ranks(2, average_gradients, (store.port,), timeout=60) == 0
