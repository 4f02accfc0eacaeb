"""Measures the time of a message between ranks, and the slowdown of a computation during communication."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.runtime.channel_memory import open_channels
from megatron.zero_bubble.runtime.collectives import TorchCollectives
from megatron.zero_bubble.runtime.communicator import TensorSpec, TorchCommunicator
from megatron.zero_bubble.runtime.exchange_lane import new_lane
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.message_times import measure_collective, measure_edges
from megatron.zero_bubble.schedule import Placement

_CALLS, _FEWEST_PRODUCTS = 4, 2
"""Number of communication calls in a round of a measurement, and least number of matrix products during each call."""
_COVERED = 2.0
"""The matrix products during a communication call take at least this many times as long as the call alone."""
_FEWEST_ROUNDS, _MOST_ROUNDS, _MILLISECONDS = 3, 12, 1000.0
"""Minimum and maximum number of rounds in a measurement, and approximate time limit for all rounds in milliseconds."""


def measure_message(communicator: type[TorchCommunicator], spec: TensorSpec, timeout: timedelta) -> float:
    """Measure the milliseconds of one message between neighbors in a pipeline; a collective call of the whole job.

    The returned time is the message time of the slowest pair of neighboring ranks. A schedule that was planned with a
    shorter message time would make the slowest pair of ranks wait at every message.
    """
    group, slowest = parallel_state.get_pipeline_model_parallel_group(), 0.0
    if group.size() > 1:
        placement = Placement("linear", group.size())
        channels = open_channels(communicator, group, placement, spec.device, timeout, lambda memory: None)
        slowest = max(measure_edges(channels, placement, group.rank(), spec).values())
        channels.close()
    return max(from_all_ranks(slowest))


def measure_collective_of_pipeline(spec: TensorSpec, timeout: timedelta) -> float:
    """Measure the milliseconds of one collective between vocabulary shards; all ranks of the job must call this."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return 0.0
    collectives = TorchCollectives.like(group, spec.device, timeout)
    lane = new_lane(spec.device, collectives.close)
    milliseconds = measure_collective(collectives, lane, spec)
    lane.close()
    collectives.close()
    return milliseconds


def exchange(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[Any]:
    """Start to send a message to the next rank of a group, and to receive a message from the previous rank."""
    size, rank = group.size(), group.rank()
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    ops = [
        dist.P2POp(dist.isend, tensor, after, group),
        dist.P2POp(dist.irecv, torch.empty_like(tensor), before, group),
    ]
    return dist.batch_isend_irecv(ops)


def collective(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[Any]:
    """Start to sum a tensor over all ranks of a group."""
    return [dist.all_reduce(tensor, group=group, async_op=True)]


def measure_beside_compute(
    spec: TensorSpec, communicate: Callable[[torch.Tensor, dist.ProcessGroup], list[Any]]
) -> float:
    """Measure the time that communication adds to a concurrent computation; a collective call of the whole job.

    Messages and collectives run at the same time as the computation, and slow the computation down, because
    communication occupies cores of the CPU or GPU. All ranks compute and communicate at the same time, as in training.
    The computation takes longer than the communication, so that no rank only waits for a message.

    Returns:
        Additional milliseconds for one call of `communicate`: the median over ranks of the mean over rounds. The mean
        over rounds includes rare delays: one collective in ten can take several times as long as the other collectives.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return 0.0
    tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    # A CPU without instructions for bfloat16 takes 60 times as long for bfloat16. On a GPU, a product has to be large
    # enough to occupy all processors.
    is_gpu = spec.device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if is_gpu else (512, torch.float32)
    matrix = torch.zeros(size, size, dtype=dtype, device=spec.device)

    def milliseconds(num_products: int, *, communicates: bool) -> float:
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(_CALLS):
            works = communicate(tensor, group) if communicates else []
            for _ in range(num_products):
                torch.mm(matrix, matrix)
            for work in works:
                work.wait()
        if is_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / _CALLS

    milliseconds(1, communicates=True)  # creates communicators
    alone = max(from_all_ranks(milliseconds(0, communicates=True)))
    product = min(from_all_ranks(milliseconds(_FEWEST_PRODUCTS, communicates=False))) / _FEWEST_PRODUCTS
    num_products = max(_FEWEST_PRODUCTS, math.ceil(_COVERED * alone / product))
    slowest = max(from_all_ranks(milliseconds(num_products, communicates=True)))
    num_rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(_MILLISECONDS / (2 * _CALLS * slowest))))
    rounds = [
        milliseconds(num_products, communicates=True) - milliseconds(num_products, communicates=False)
        for _ in range(num_rounds)
    ]
    return max(0.0, statistics.median(from_all_ranks(statistics.fmean(rounds))))
