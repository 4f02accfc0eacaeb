"""Reads the microbatches of each step, and reorders the microbatches by a plan that depends on microbatch sizes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from operator import add
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron.zero_bubble.mcore.recorded_call import ForwardStepError
from megatron.zero_bubble.mcore.step_call import StepCall
from megatron.zero_bubble.planner.step_plan import StepRules
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.runtime.look_ahead import LookAhead
from megatron.zero_bubble.runtime.microbatch_sizes import size_of
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.plan_report import PlanningOptions
from megatron.zero_bubble.runtime.process_group import Membership, connect
from megatron.zero_bubble.runtime.running_plan import RunningPlan
from megatron.zero_bubble.runtime.step_planner import FIRST_STEPS, OrderTimes, StepDecision, StepPlanner
from megatron.zero_bubble.schedule import Infeasible, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize

Iterators = Sequence[Iterator[Any] | None]
T = TypeVar("T")


class StepData:
    """The microbatches of a step, read from the chunks' data iterators; a chunk without data has no iterator (None).

    Chunks that share an iterator also share its microbatches. A forward step may read its data in another way than with
    `next`. The microbatches of a source without `__next__` are not read before the step, and their sizes are unknown.
    """

    def __init__(self, iterators: Iterators, count: int) -> None:
        self._sources, self._count = iterators, count
        sources = {id(source): source for source in iterators if hasattr(source, "__next__")}
        self._read = {key: list(islice(_items(source), count)) for key, source in sources.items()}

    def sizes(self) -> list[MicrobatchSize | None]:
        """Return the size of every microbatch; None for a microbatch of unknown size."""
        return [size_of(item) for item in next(iter(self._read.values()), [None] * self._count)]

    def sizes_ahead(self) -> list[MicrobatchSize | None]:
        """Return the sizes of the next step's microbatches; [] if the data iterator cannot read ahead.

        An iterator that saves its position, such as Energon's, is not read ahead: a checkpoint would have a position
        after microbatches that the saved job has not trained on.
        """
        source = next((source for source in self._sources if source is not None), None)
        if isinstance(source, RerunDataIterator):
            items = source.iterable
            saves_position = any(hasattr(items, name) for name in ("save_state", "state_dict"))
            if isinstance(items, Iterable) and not (isinstance(items, LookAhead) or saves_position):
                source.iterable = LookAhead(items)
            source = source.iterable
        return [size_of(item) for item in source.peek(self._count)] if isinstance(source, LookAhead) else []

    def ordered(self, decision: StepDecision) -> list[Iterator[Any] | None]:
        """Return iterators over the microbatches in the planned order.

        An iterator keeps the order of the data if the data ends before the last microbatch of the step. After the
        microbatches of the step, an iterator in another order raises `ForwardStepError`.

        Raises:
            ForwardStepError: the planned order differs from the data's order, but this rank's microbatches were not
                read.
        """
        ordered = {id(source): self._ordered(source, decision) for source in self._sources if source is not None}
        return [ordered.get(id(source)) for source in self._sources]

    def _ordered(self, source: Iterator[Any], decision: StepDecision) -> Iterator[Any]:
        items, is_in_data_order = self._read.get(id(source)), decision.places == tuple(range(self._count))
        if items is None:
            if is_in_data_order:
                return source
            raise ForwardStepError(
                f"the data source {type(source).__name__} has no __next__, so its microbatches cannot be ordered by "
                "their lengths: pass iterators on all ranks, or --zero-bubble-microbatch-order data"
            )
        if len(items) < self._count or is_in_data_order:
            return chain(items, _items(source))
        return _planned(items, decision.places)


def _planned(items: list[Any], places: Sequence[int]) -> Iterator[Any]:
    yield from (items[number] for number in places)
    raise ForwardStepError(
        f"the forward step reads more than {len(items)} items for {len(items)} microbatches, but microbatches are "
        "ordered by their lengths only if each is one item: --zero-bubble-microbatch-order data keeps their order"
    )


def _items(source: Any) -> Iterator[Any]:
    """Yield the items of an iterator that may lack `__iter__`, such as Megatron-LM's `RerunDataIterator`."""
    with suppress(StopIteration):
        while True:
            yield next(source)


class JobPeers:
    """Lets a `StepPlanner` communicate with all ranks of a megatron-core job; the constructor is a collective call.

    Args:
        timeout: time limit for one message.
    """

    def __init__(self, timeout: timedelta) -> None:
        replicas = from_all_ranks(parallel_state.get_data_parallel_rank())
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
        """Run `action` on a replica's first rank; every rank of the replica gets the result or raises `Infeasible`."""
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
        """Return the `value` of every rank, in the order of ranks; a collective call of the job."""
        return from_all_ranks(value)

    def highest(self, level: int) -> int:
        """Return the maximum of `level` over all replicas; a collective call of the replicas' first ranks.

        A higher level stands for a schedule that needs less memory (see `StepDecision`).
        """
        if self._firsts is None:
            return level
        highest = torch.tensor([level])
        self._firsts.allreduce([highest], dist.ReduceOp.MAX).wait()
        return int(highest)


@dataclass(eq=False)
class StepPlans:
    """The plans of a job's training steps.

    Args:
        running: the current plan of the run.
        observer: the observer of the run's steps.
        planning: options of profiling and planning.
        timeout: time limit for a message about a plan.
        reorders: whether microbatches may run in an order other than the order of the data; None allows reordering only
            if the model's configuration sets `variable_seq_lengths`.
        interlocks: whether ranks begin an iteration while other ranks still run the previous iteration, as
            post-validation allows.
    """

    running: RunningPlan
    observer: StepObserver
    planning: PlanningOptions
    timeout: timedelta
    reorders: bool | None
    interlocks: bool
    _planner: StepPlanner | None = None

    def are_made(self, config: Any) -> bool:
        """Tell whether the microbatches of a step are read before the step, so that the step can be planned."""
        return self._reorders(config) or (config.variable_seq_lengths and self.planning.has_absolute_limit)

    def _reorders(self, config: Any) -> bool:
        return config.variable_seq_lengths if self.reorders is None else self.reorders

    def decide(self, step: int, call: StepCall) -> tuple[StepDecision, list[Iterator[Any] | None]]:
        """Return the plan of a step, and iterators over the microbatches in planned order; a collective call."""
        planner, data = self._prepare_planner(), StepData(call.data_iterators, call.num_microbatches)
        plan, profile, limits = self.running.plan, self.running.profile, None
        if self.planning.has_absolute_limit and profile is not None and plan.request.limits:
            # The limits of the plan leave out the temporary memory of an operation.
            limits = tuple(map(add, plan.request.limits, profile.inside_ranks))
        rules = StepRules(plan, limits, self._reorders(call.config), self.interlocks)
        decision = planner.decide(step, rules, call.num_microbatches, data.sizes, data.sizes_ahead)
        return decision, data.ordered(decision)

    def _prepare_planner(self) -> StepPlanner:
        if self._planner is None:
            planning, placement = self.planning, self.running.plan.placement
            measured = (planning.first_step, planning.last_step) if planning.last_step > 0 else FIRST_STEPS
            rank, peers = parallel_state.get_pipeline_model_parallel_rank(), JobPeers(self.timeout)
            self._planner = StepPlanner(placement, rank, self.observer, measured, peers)
        return self._planner

    def after_step(self, step: int) -> None:
        """If `step` ends a series of measured steps, fit costs as functions of microbatch size; a collective call."""
        if self._planner is not None:
            self._planner.after_step(step, self._usual_costs)

    def _usual_costs(self) -> StageCosts:
        plan, profile = self.running.plan, self.running.profile
        return (plan.costs if profile is None else profile.costs) or default_costs(plan.placement, plan.recompute)

    def take_times(self) -> OrderTimes | None:
        """Return the `OrderTimes` of the steps since the last call of `take_times`; None if `decide` has not run."""
        return None if self._planner is None else self._planner.take_times()

    def close(self) -> None:
        """End the process that plans steps ahead of time."""
        if self._planner is not None:
            self._planner.close()
