"""Reads the microbatches of each step, and gives them to the schedule in the order that was planned for their sizes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.runtime.microbatch_sizes import size_of
from megatron.zero_bubble.runtime.process_group import Membership, connect
from megatron.zero_bubble.runtime.step_planner import StepDecision
from megatron.zero_bubble.schedule import Infeasible
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize

Iterators = Sequence[Iterator[Any] | None]
T = TypeVar("T")


class StepData:
    """The microbatches of a step, read from the iterators of this rank's chunks, None where a chunk needs no data."""

    def __init__(self, iterators: Iterators, count: int) -> None:
        self._count = count
        self._read = [None if source is None else list(islice(source, count)) for source in iterators]

    def sizes(self) -> list[MicrobatchSize | None]:
        """The size of every microbatch, None where it cannot be told."""
        return [size_of(item) for item in next((items for items in self._read if items is not None), [])]

    def ordered(self, decision: StepDecision) -> list[Iterator[Any] | None]:
        """Iterators over the microbatches in the order of a decision; data that ended too early stays in its order."""
        return [
            None
            if items is None
            else iter([items[number] for number in decision.places] if len(items) == self._count else items)
            for items in self._read
        ]


class JobPeers:
    """All ranks of a megatron-core job, as the `Peers` of a `StepPlanner`; making it is a collective call of the job.

    Args:
        timeout: for one message.
    """

    def __init__(self, timeout: timedelta) -> None:
        replicas = [0] * dist.get_world_size()
        dist.all_gather_object(replicas, parallel_state.get_data_parallel_rank())
        own = replicas[dist.get_rank()]
        self._timeout = timeout
        members = tuple(rank for rank, replica in enumerate(replicas) if replica == own)
        self._replica = self._connect(f"plans of steps in replica {own}", members)
        self._is_first = members[0] == dist.get_rank()
        firsts = tuple(replicas.index(replica) for replica in sorted(set(replicas)))
        self._firsts = self._connect("plans of steps", firsts) if self._is_first and len(firsts) > 1 else None

    def _connect(self, name: str, members: tuple[int, ...]) -> Any:
        return connect(Membership(name, members, members.index(dist.get_rank()), torch.device("cpu"), self._timeout))

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on the replica's first rank; return its result, or raise its `Infeasible`, on all of them."""
        answer: T | Infeasible | None = None
        if self._is_first:
            try:
                answer = action()
            except Infeasible as error:
                answer = error
        content = torch.frombuffer(bytearray(pickle.dumps(answer)), dtype=torch.uint8)
        length = torch.tensor([len(content)])
        self._replica.broadcast(length, 0).wait()
        if not self._is_first:
            content = torch.empty(int(length), dtype=torch.uint8)
        self._replica.broadcast(content, 0).wait()
        shared = pickle.loads(content.numpy().tobytes())
        if isinstance(shared, Infeasible):
            raise shared
        return shared

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank of the job."""
        values = [value] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def highest(self, level: int) -> int:
        """Return the highest level of all replicas; called on their first ranks."""
        if self._firsts is None:
            return level
        highest = torch.tensor([level])
        self._firsts.allreduce([highest], dist.ReduceOp.MAX).wait()
        return int(highest)
