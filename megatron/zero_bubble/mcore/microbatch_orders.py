"""Reads the microbatches of each step, and gives them to the schedule in the order that was planned for their sizes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zero_bubble.mcore.microbatch_sizes import size_of
from megatron.zero_bubble.planner.microbatch_order import MicrobatchOrder, order_microbatches
from megatron.zero_bubble.planner.request import Limits
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.process_group import Membership, connect
from megatron.zero_bubble.runtime.replanner import PlanningOptions
from megatron.zero_bubble.runtime.size_profile import SizeProfile
from megatron.zero_bubble.schedule import Infeasible, Placement, Schedule, StageCosts
from megatron.zero_bubble.schedule.pairs import PAIRED
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize, SizedCosts

FIRST_STEPS = (1, 3)
"""Steps that are measured where none are profiled."""
REFITTED_AFTER = 8
"""Steps between the first fit of costs to sizes and the second, which has more samples."""
PLANNING_SHARE = 0.02
"""Planning may take about this share of a step."""
_SECONDS_PER_OPERATION = 0.5e-6
"""Time to simulate one operation; the number of orders that are tried follows from it."""
_FEWEST, _MOST = 12, 200
"""Number of orders that are tried."""

Iterators = Sequence[Iterator[Any] | None]


@dataclass
class OrderTimes:
    """Sums over the steps since the last report whose order was planned; times in milliseconds."""

    num_steps: int = 0
    predicted: float = 0.0
    predicted_in_data_order: float = 0.0
    planning: float = 0.0

    def add(self, answer: _Answer) -> None:
        """Add a step whose order was planned."""
        assert answer.order is not None
        self.num_steps += 1
        self.predicted += answer.order.time
        self.predicted_in_data_order += answer.order.time_in_data_order
        self.planning += answer.milliseconds


class _Answer(NamedTuple):
    """The first rank's decision about a step."""

    sizes: list[MicrobatchSize] | None
    """In the order of the data; None if they cannot be told."""
    places: tuple[int, ...]
    order: MicrobatchOrder | None = None
    """The plan, if there is one."""
    milliseconds: float = 0.0
    """Time of planning."""


class Ordered(NamedTuple):
    """The microbatches of a step in the order in which the schedule takes them."""

    iterators: Iterators
    places: tuple[int, ...] | None
    """Place in the schedule -> number of the microbatch in the data; None for the order of the data."""

    def in_data_order(self, results: list[Any]) -> list[Any]:
        """Results by place in the schedule, brought into the order of the data."""
        if self.places is None or len(results) != len(self.places):
            return results
        return [result for _, result in sorted(zip(self.places, results, strict=True), key=lambda pair: pair[0])]


class MicrobatchOrders:
    """Chooses the order of each step's microbatches, once the costs of their sizes are measured.

    The first rank of a replica reads the sizes and plans; all ranks that read data follow it. Until costs are measured,
    and where sizes cannot be told, the order is the data's.

    Args:
        placement: of the schedule.
        rank: this process's pipeline rank.
        observer: provides the measured operations of each step.
        planning: tells the steps that are measured; None for the first ones.
        timeout: for the message with the order.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        observer: StepObserver,
        planning: PlanningOptions | None,
        timeout: timedelta,
    ) -> None:
        self._profile = SizeProfile(placement, rank)
        self._observer, self._timeout = observer, timeout
        self._first, last = FIRST_STEPS
        if planning is not None and planning.last_step > 0:
            self._first, last = planning.first_step, planning.last_step
        self._fits_after = {last, last + REFITTED_AFTER}
        self._costs: SizedCosts | None = None
        self._group: Any = None
        self._is_first = False
        self._times = OrderTimes()
        observer.sinks.append(self._profile.collect)

    def take_times(self) -> OrderTimes:
        """Return the sums since the last call."""
        times, self._times = self._times, OrderTimes()
        return times

    def order(
        self, step: int, iterators: Iterators, schedule: Schedule, limits: Limits | None, *, interlocks: bool
    ) -> Ordered:
        """Read a step's microbatches and order them; a collective call of the ranks of a replica.

        Args:
            step: number of the step.
            iterators: one a model chunk; None where a chunk needs no data.
            schedule: the step's schedule, without post-validation.
            limits: memory of every rank, in bytes; None for no limit.
            interlocks: whether iterations interlock.

        Raises:
            Infeasible: the microbatches do not fit into the limits in any order.
        """
        count = schedule.num_microbatches
        items = {id(source): list(islice(source, count)) for source in iterators if source is not None}
        self._join()
        answer: _Answer | Infeasible | None = None
        if self._is_first:
            sizes = [size_of(item) for item in next(iter(items.values()), [])]
            try:
                answer = self._plan(sizes, schedule, limits, interlocks=interlocks)
            except Infeasible as error:
                answer = error
        answer = self._share(answer)
        if isinstance(answer, Infeasible):
            raise answer
        places = answer.places
        if answer.sizes is not None and self._first <= step <= max(self._fits_after):
            self._profile.note(step, [answer.sizes[number] for number in places])
        if answer.order is not None:
            self._times.add(answer)
        ordered = {
            key: iter([read[number] for number in places] if len(read) == count else read)
            for key, read in items.items()
        }
        given = [None if source is None else ordered[id(source)] for source in iterators]
        return Ordered(given, None if places == tuple(range(count)) else places)

    def _plan(
        self, sizes: list[MicrobatchSize | None], schedule: Schedule, limits: Limits | None, *, interlocks: bool
    ) -> _Answer:
        """Plan the order of microbatches of these sizes."""
        count = schedule.num_microbatches
        known = [size for size in sizes if size is not None]
        if len(known) < count:
            return _Answer(None, tuple(range(count)))
        if self._costs is None or len(set(known)) == 1 or not schedule.kinds.isdisjoint(PAIRED):
            return _Answer(known, tuple(range(count)))
        begin = time.perf_counter()
        costs = [self._costs.of(size) for size in known]
        num_ops = 3 * schedule.num_stages * count
        usual = count * max(map(self._costs.usual.work, range(schedule.num_stages)))
        share = PLANNING_SHARE * usual / 1000.0 / (num_ops * _SECONDS_PER_OPERATION)
        num_tried = min(max(_FEWEST, round(share)), _MOST)
        order = order_microbatches(schedule, costs, limits=limits, num_tried=num_tried, interlocks=interlocks)
        return _Answer(known, order.places, order, 1000.0 * (time.perf_counter() - begin))

    def _join(self) -> None:
        """Connect the ranks of this replica, at the first call, which is a collective call of the whole job."""
        if self._group is not None:
            return
        replicas = [0] * dist.get_world_size()
        dist.all_gather_object(replicas, parallel_state.get_data_parallel_rank())
        own = replicas[dist.get_rank()]
        members = tuple(rank for rank, replica in enumerate(replicas) if replica == own)
        member = members.index(dist.get_rank())
        name = f"orders of microbatches in replica {own}"
        self._group = connect(Membership(name, members, member, torch.device("cpu"), self._timeout))
        self._is_first = member == 0

    def _share(self, answer: Any) -> Any:
        """Return the first rank's answer on all ranks of the replica."""
        content = torch.frombuffer(bytearray(pickle.dumps(answer)), dtype=torch.uint8)
        length = torch.tensor([len(content)])
        self._group.broadcast(length, 0).wait()
        if not self._is_first:
            content = torch.empty(int(length), dtype=torch.uint8)
        self._group.broadcast(content, 0).wait()
        return pickle.loads(content.numpy().tobytes())

    def after_step(self, step: int, usual: StageCosts) -> None:
        """Fit costs to sizes after the steps that measure them; a collective call of the whole job.

        Args:
            usual: costs of the mean microbatch.
        """
        if step in self._fits_after:
            self._observer.flush()
            self._costs = self._profile.fit(usual)
