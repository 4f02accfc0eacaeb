"""The time of messages and collectives on ranks that wait while others compute."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch

from megatron.zero_bubble.runtime import message_times
from megatron.zero_bubble.runtime.communicator import TensorSpec
from megatron.zero_bubble.runtime.exchange_lane import ThreadLane
from megatron.zero_bubble.runtime.message_times import measure_collective, measure_edges
from megatron.zero_bubble.schedule import Placement
from tests.runtime.in_memory import InMemoryCollectives, InMemoryNetwork

SPEC = TensorSpec((2, 3), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("while_computing", [False, True])
@pytest.mark.parametrize("placement", [Placement("linear", 3), Placement("v", 2, 2), Placement("interleaved", 3, 2)])
def test_every_edge_between_ranks_is_measured_by_both_its_ends(placement, while_computing):
    network = InMemoryNetwork(placement.num_ranks)

    def measure(rank: int) -> dict[int, float]:
        return measure_edges(network.communicator(rank), placement, rank, SPEC, while_computing=while_computing)

    with ThreadPoolExecutor(placement.num_ranks) as pool:
        measured = list(pool.map(measure, range(placement.num_ranks)))
    for edge in range(placement.num_stages - 1):
        ends = {placement.rank_of(edge), placement.rank_of(edge + 1)}
        knows = {rank for rank, edges in enumerate(measured) if edge in edges}
        assert knows == (ends if len(ends) == 2 else set())
    assert all(0 < ms < 1000 for edges in measured for ms in edges.values())
    assert network.undelivered() == []


class Lazy:
    """Sends a message only when the sender waits for it, as if communication had no processor of its own."""

    def __init__(self, network: InMemoryNetwork, rank: int) -> None:
        self._end = network.communicator(rank)
        self.receive = self._end.receive

    def send(self, tensor: torch.Tensor, peer: int) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: self._end.send(tensor, peer).wait())


def test_a_message_takes_as_long_as_its_sender_computes_if_it_leaves_only_then(monkeypatch):
    network, placement = InMemoryNetwork(2), Placement("linear", 2)
    monkeypatch.setattr(message_times, "_compute", lambda device: time.sleep(0.05))

    def measured(*, while_computing: bool) -> list[dict[int, float]]:
        def measure(rank: int) -> dict[int, float]:
            return measure_edges(Lazy(network, rank), placement, rank, SPEC, while_computing=while_computing)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(measure, range(2)))

    assert max(edges[0] for edges in measured(while_computing=False)) < 40
    assert min(edges[0] for edges in measured(while_computing=True)) > 40


class Slow:
    """Buffers messages, as a socket does: each takes 20 ms on the wire, one after the other."""

    def __init__(self, network: InMemoryNetwork, rank: int) -> None:
        self._end, self._wire = network.communicator(rank), ThreadPoolExecutor(1)
        self.receive = self._end.receive

    def send(self, tensor: torch.Tensor, peer: int) -> SimpleNamespace:
        def deliver() -> None:
            time.sleep(0.02)
            self._end.send(tensor, peer).wait()

        self._wire.submit(deliver)
        return SimpleNamespace(wait=lambda: None)


def test_a_message_does_not_wait_for_an_earlier_one_on_a_slow_wire(monkeypatch):
    monkeypatch.setattr(message_times, "_compute", lambda device: None)
    network, placement = InMemoryNetwork(2), Placement("linear", 2)

    def measure(rank: int) -> list[float]:
        end = Slow(network, rank)
        return [measure_edges(end, placement, rank, SPEC, while_computing=busy)[0] for busy in (False, True)]

    with ThreadPoolExecutor(2) as pool:
        assert all(busy < 1.4 * idle for idle, busy in pool.map(measure, range(2)))


class OnStreams:
    """A rank with streams, as on a GPU: `wait` lets only the computation wait, and the host goes on."""

    def __init__(self, network: InMemoryNetwork, rank: int) -> None:
        self._end = network.communicator(rank)
        self._receives, self._sends, self.computation = (ThreadPoolExecutor(1) for _ in range(3))

    def receive(self, peer: int, spec: TensorSpec) -> SimpleNamespace:
        return self._pending(self._receives.submit(self._end.receive(peer, spec).wait))

    def send(self, tensor: torch.Tensor, peer: int) -> SimpleNamespace:
        before = self.computation.submit(int)
        return self._pending(self._sends.submit(lambda: (before.result(), self._end.send(tensor, peer).wait())))

    def _pending(self, message: Future) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: self.computation.submit(message.result))


def test_on_streams_a_message_does_not_wait_for_the_computation_before_it(monkeypatch):
    network, placement = InMemoryNetwork(2), Placement("linear", 2)
    ends = {rank: OnStreams(network, rank) for rank in range(2)}
    own = ContextVar[OnStreams]("own")
    monkeypatch.setattr(message_times, "_compute", lambda device: own.get().computation.submit(time.sleep, 0.05))
    monkeypatch.setattr(message_times, "_synchronize", lambda device: own.get().computation.submit(int).result())

    def measure(rank: int) -> float:
        own.set(ends[rank])
        return measure_edges(ends[rank], placement, rank, SPEC)[0]

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(measure, range(2))) < 25


def test_a_collective_is_measured_on_the_rank_that_waits(one_rank):
    collectives = InMemoryCollectives(InMemoryNetwork(1), 0, 1)
    lane = ThreadLane(collectives.close)
    assert 0 < measure_collective(collectives, lane, SPEC) < 1000
    lane.close()
