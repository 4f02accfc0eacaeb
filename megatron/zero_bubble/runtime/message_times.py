"""Measures how long a rank waits for messages and for collectives while the other ranks compute.

A message from a computing rank is slower than a message from an idle rank, because computation and communication share
the cores of the CPU or GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from megatron.zero_bubble.runtime.collectives import Collectives
from megatron.zero_bubble.runtime.communicator import Communicator, TensorSpec, channels
from megatron.zero_bubble.runtime.exchange_lane import ExchangeLane
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.schedule import Placement

_IDLE_TRIPS = 7
"""Number of round trips between idle ranks; a message between idle ranks takes half of the median round-trip time."""
_BUSY_TRIPS = 16
"""Number of messages that each rank sends while it computes; the times of these messages are averaged."""
_COLLECTIVES = 16
"""Smallest number of measured collectives; a pipeline with more ranks than that measures one collective per rank."""
_PRODUCTS = 1000
"""Number of small matrix products that keep a rank busy during a measurement: about 5 ms on a CPU core."""


def measure_edges(
    communicator: Communicator, placement: Placement, rank: int, spec: TensorSpec, *, while_computing: bool = True
) -> dict[int, float]:
    """Measure how many milliseconds a message takes between each stage of this rank and the adjacent stages.

    `measure_edges` is a collective call of all ranks of a pipeline. Edge `s` connects stages `s` and `s + 1`. The
    result has no entry for an edge between two stages of the same rank. Edges between the same two ranks share one
    measurement. Two pairs of ranks that share no rank can measure their messages at the same time.

    Args:
        while_computing: whether the sender computes while its message is in flight, as in training.
    """
    measured = {}
    # All ranks go through the pairs in the order of the channels, so that ranks never wait for each other in a circle.
    for low, high in channels(placement):
        if low < high and rank in (low, high):
            time_of_message = _message_time(
                communicator, low + high - rank, spec, begins=rank == low, busy=while_computing
            )
            for edge in range(placement.num_stages - 1):
                if {placement.rank_of(edge), placement.rank_of(edge + 1)} == {low, high}:
                    measured[edge] = time_of_message
    return measured


def _message_time(communicator: Communicator, peer: int, spec: TensorSpec, *, begins: bool, busy: bool) -> float:
    """Measure how many milliseconds a message takes between this rank and `peer`, which makes the same call."""
    message = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    trips: list[float] = []
    waits: list[float] = []
    for _ in range(_IDLE_TRIPS):
        answer = communicator.receive(peer, spec)
        with _timed(trips, spec.device):
            if begins:
                communicator.send(message, peer).wait()
            answer.wait()
            if not begins:
                communicator.send(message, peer).wait()
    idle = statistics.median(trips) / 2
    if not busy:
        return idle
    # After each measurement, the rank that computed sends one more message. The other rank receives this message before
    # it starts the next measurement, so that the peer is ready and no message is in flight. The first measurement after
    # the ranks change places does not count, because a message may still be in flight.
    for number in range(2 * _BUSY_TRIPS):
        if begins is (number < _BUSY_TRIPS):
            answer = communicator.receive(peer, spec)
            with _timed([] if number == _BUSY_TRIPS else waits, spec.device):
                communicator.send(message, peer).wait()
                answer.wait()
            communicator.receive(peer, spec).wait()
            _synchronize(spec.device)  # with NCCL, `wait` does not wait until the peer has computed
        else:
            communicator.receive(peer, spec).wait()
            pending = communicator.send(message, peer)
            _compute(spec.device)
            pending.wait()
            communicator.send(message, peer).wait()
    return max(idle, statistics.fmean(waits) - idle)


@contextmanager
def _timed(times: list[float], device: torch.device) -> Iterator[None]:
    """Append the duration of the `with` block in milliseconds to `times`."""
    start = time.perf_counter()
    yield
    _synchronize(device)
    times.append((time.perf_counter() - start) * 1e3)


def measure_collective(collectives: Collectives, lane: ExchangeLane, spec: TensorSpec) -> float:
    """Measure how many milliseconds a rank waits for SOFTMAX, the collective after S (output layer on a shard).

    All ranks of the job call `measure_collective`, and get the same result. The measured collective gathers three
    numbers per token, and then sums a tensor of shape `spec.shape` over the ranks. As in training, an `ExchangeLane`
    runs the collectives.

    Args:
        collectives: runs collective operations among this pipeline's ranks.
        spec: type and shape of a message between stages; the shape is [..., hidden].
    """
    message = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    numbers = torch.zeros(3, message.numel() // spec.shape[-1], device=spec.device)
    gathered = numbers.new_empty(collectives.size, *numbers.shape)
    waits: list[float] = []

    def exchange(root: int) -> None:
        collectives.gather_all(numbers, gathered)
        collectives.sum_to(message, root)

    for number in range(max(_COLLECTIVES, collectives.size)):
        root = number % collectives.size
        lane.submit(lambda: collectives.gather_all(numbers, gathered)).wait()
        _synchronize(spec.device)
        with _timed(waits if collectives.rank == root else [], spec.device):
            pending = lane.submit(partial(exchange, root))
            if collectives.rank != root:
                _compute(spec.device)
            pending.wait()
    return statistics.fmean(wait for each in from_all_ranks(waits) for wait in each)


def _compute(device: torch.device) -> None:
    matrix = torch.zeros(64, 64, device=device)
    for _ in range(_PRODUCTS):
        torch.mm(matrix, matrix)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
