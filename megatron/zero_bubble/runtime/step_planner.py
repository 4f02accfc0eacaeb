"""Plans each step whose microbatches differ in size, once the costs of their sizes are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, NamedTuple, Protocol, TypeVar

from megatron.zero_bubble.planner.microbatch_order import MicrobatchOrder
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.planner.step_plan import plan_step
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.size_profile import SizeProfile
from megatron.zero_bubble.schedule import Infeasible, Placement, Schedule, StageCosts
from megatron.zero_bubble.schedule.pairs import PAIRED
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize, SizedCosts

FIRST_STEPS = (1, 3)
"""Steps that are measured where none are profiled."""
REFITTED_AFTER = 8
"""Steps between the first fit of costs to sizes and the second, which has more samples."""
PLANNING_SHARE, MOST_SECONDS = 0.02, 0.025
"""Planning may take about this share of a step, and at most about so many seconds."""
_SECONDS_PER_OPERATION = 0.5e-6
"""Time to simulate one operation; the number of orders that are tried follows from it."""
_FEWEST, _MOST = 12, 200
"""Number of orders that are tried."""

T = TypeVar("T")


class Peers(Protocol):
    """The ranks that run the same steps."""

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank of this pipeline; return its result, or raise its `Infeasible`, on all."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank that measures the same stages or others of them."""
        ...

    def highest(self, level: int) -> int:
        """Return the highest level of all pipelines; called on their first ranks."""
        ...


@dataclass
class OrderTimes:
    """Sums over the steps since the last report that were planned; times in milliseconds."""

    num_steps: int = 0
    predicted: float = 0.0
    predicted_in_data_order: float = 0.0
    planning: float = 0.0
    num_in_less_memory: int = 0
    """Steps that ran another schedule because their microbatches did not fit."""


class StepDecision(NamedTuple):
    """The decision of the first rank about a step."""

    sizes: list[MicrobatchSize] | None
    """In the order of the data; None if they cannot be told."""
    places: tuple[int, ...]
    """Place in the schedule -> number of the microbatch in the data."""
    level: int = 0
    """Above 0 if a schedule for less memory takes the place of the run's (see `plan_step`)."""
    schedule: Schedule | None = None
    """That schedule for less memory; None at level 0."""
    order: MicrobatchOrder | None = None
    """The order as it was planned, if it was."""
    milliseconds: float = 0.0
    """Time of planning."""

    def in_data_order(self, results: list[Any]) -> list[Any]:
        """Results by place in the schedule, brought into the order of the data."""
        if len(results) != len(self.places):
            return results
        return [result for _, result in sorted(zip(self.places, results, strict=True), key=lambda pair: pair[0])]


class StepPlanner:
    """Plans the steps of a run. Until costs are measured, and where sizes cannot be told, the order is the data's.

    Args:
        placement: of the schedules.
        rank: this process's pipeline rank.
        observer: provides the measured operations of each step.
        measured: the first and the last step that is measured.
        peers: the other ranks.
    """

    def __init__(
        self, placement: Placement, rank: int, observer: StepObserver, measured: tuple[int, int], peers: Peers
    ) -> None:
        self._profile = SizeProfile(placement, rank)
        self._observer, self._peers = observer, peers
        self._first, last = measured
        self._fits_after = {last, last + REFITTED_AFTER}
        self._costs: SizedCosts | None = None
        self._times = OrderTimes()
        observer.sinks.append(self._profile.collect)

    def measures(self, step: int) -> bool:
        """Whether a step is measured."""
        return self._first <= step <= max(self._fits_after)

    def take_times(self) -> OrderTimes:
        """Return the sums since the last call."""
        times, self._times = self._times, OrderTimes()
        return times

    def decide(
        self,
        step: int,
        read_sizes: Callable[[], Sequence[MicrobatchSize | None]],
        plan: RunSchedules,
        num_microbatches: int,
        limits: Sequence[float] | None = None,
        *,
        reorders: bool = True,
        interlocks: bool = False,
    ) -> StepDecision:
        """Plan a step; a collective call of the ranks of a pipeline, and with limits of all pipelines.

        Args:
            step: its number.
            read_sizes: returns the sizes of its microbatches; called on the first rank.
            plan: the schedules of the run, without post-validation.
            limits: bytes that the operations of every rank may need; None for no limit.
            reorders: whether its microbatches may run in another order than that of the data.
            interlocks: whether iterations interlock.

        Raises:
            Infeasible: the microbatches do not fit into the limits, even one after the other.
        """
        decision = self._peers.on_first(
            lambda: self._decide(read_sizes(), plan, num_microbatches, limits, reorders, interlocks)
        )
        if decision.sizes is not None and self.measures(step):
            self._profile.note(step, [decision.sizes[number] for number in decision.places])
        if decision.order is not None:
            self._times.num_steps += 1
            self._times.predicted += decision.order.time
            self._times.predicted_in_data_order += decision.order.time_in_data_order
            self._times.planning += decision.milliseconds
            self._times.num_in_less_memory += decision.level > 0
        return decision

    def _decide(
        self,
        sizes: Sequence[MicrobatchSize | None],
        plan: RunSchedules,
        count: int,
        limits: Sequence[float] | None,
        reorders: bool,
        interlocks: bool,
    ) -> StepDecision:
        known = [size for size in sizes if size is not None]
        is_known = len(known) == count
        as_it_comes = StepDecision(known if is_known else None, tuple(range(count)))
        is_alike = limits is None and len(set(known)) == 1
        if self._costs is None or not plan.schedule(count).kinds.isdisjoint(PAIRED):
            return as_it_comes
        begin, planned, problem = time.perf_counter(), None, None
        costs = [self._costs.of(size) for size in known]
        plan_at = partial(
            plan_step,
            plan,
            costs,
            limits=None if limits is None else tuple(limits),
            inside=[[curve.at(size) for curve in self._costs.inside] for size in known],
            names=[f"microbatch {number} ({size.tokens} tokens)" for number, size in enumerate(known)],
            num_tried=_num_tried(costs) if reorders and is_known else 1,
            interlocks=interlocks,
        )
        if is_known and not is_alike:
            try:
                planned = plan_at()
            except Infeasible as error:
                problem = error
        if limits is not None:
            # Pipelines reduce gradients together, so that they run the same schedule.
            level = self._peers.highest(planned.level if planned is not None else 0)
            if planned is not None and level > planned.level:
                planned = plan_at(least_level=level)
        if problem is not None:
            raise problem
        if planned is None:
            return as_it_comes
        milliseconds = 1000.0 * (time.perf_counter() - begin)
        schedule = planned.schedule if planned.level else None
        return StepDecision(known, planned.order.places, planned.level, schedule, planned.order, milliseconds)

    def after_step(self, step: int, usual: Callable[[], StageCosts]) -> None:
        """Fit costs to sizes after the steps that measure them; a collective call of the whole job.

        Args:
            usual: returns the costs of the mean microbatch.
        """
        if step in self._fits_after:
            self._observer.flush()
            self._costs = self._profile.fit(usual(), self._peers.gather)


def _num_tried(costs: Sequence[StageCosts]) -> int:
    """The number of orders that are tried for a step of microbatches of these costs."""
    num_stages = costs[0].num_stages
    longest = max(sum(each.work(stage) for each in costs) for stage in range(num_stages))
    seconds, each = PLANNING_SHARE * longest / 1000.0, 3 * num_stages * len(costs) * _SECONDS_PER_OPERATION
    return min(max(_FEWEST, round(min(seconds, MOST_SECONDS) / each)), _MOST)


def whole_limits(limits: Sequence[float], inside: Sequence[float]) -> tuple[float, ...]:
    """The bytes that the operations of every rank may need, of the limits on what they leave behind."""
    return tuple(map(add, limits, inside))
