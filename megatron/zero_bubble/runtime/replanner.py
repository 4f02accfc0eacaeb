"""Profiles a window of steps, plans from what it found, and plans again when the times drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.planning import BroadcastPlan, MemoryLimit, ModelDescription, Prediction
from megatron.zero_bubble.runtime.profiler import ChunkCosts, Profiler, gather_costs
from megatron.zero_bubble.runtime.timeline import MeasuredOp
from megatron.zero_bubble.schedule import StageCosts
from megatron.zero_bubble.schedule.plan import NamedPlan, Plan
from megatron.zero_bubble.schedule.serialize import Profile

_MARGIN = 0.9
"""Part of the free memory that `auto` gives to activations: allocators fragment."""
_DRIFT_STEPS = 20
"""Steps between two looks at whether the times have drifted."""


@dataclass(frozen=True)
class PlanningOptions:
    """How a run profiles and plans.

    `first_step` to `last_step`, inclusive, are profiled. A given `profile` is planned with before the
    first step instead. `memory_limit` None leaves the schedule its own; `threshold` is the relative
    change of a stage's time that starts planning anew, 0 for never.
    """

    first_step: int
    last_step: int
    model: ModelDescription
    memory_limit: MemoryLimit | None = None
    profile: Profile | None = None
    threshold: float = 0.0


@dataclass(frozen=True)
class Report:
    """What was found and decided: for the log."""

    prediction: Prediction
    is_new_plan: bool
    """Whether the schedule was made anew from the costs; otherwise they only serve to predict."""
    memory_limit: float | None
    """In bytes."""
    step: int
    """After this one."""


class Replanner:
    """Decides, at the end of a step, with which plan the run goes on.

    Args:
        plan: what the run starts with. A `NamedPlan` is made anew from costs, any other is kept.
        observer: where the operations of each step come from.
        measure_edges: a collective call that measures the communication time of this rank's edges.
        report: told about each decision, on every rank.
    """

    def __init__(
        self,
        plan: Plan,
        options: PlanningOptions,
        rank: int,
        observer: StepObserver,
        measure_edges: Callable[[], Mapping[int, float]],
        report: Callable[[Report], None],
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._options = options
        self._rank = rank
        self._observer = observer
        self._measure_edges = measure_edges
        self._report = report
        self._device = device
        self._profiler = Profiler(plan.placement, rank)
        self._edges: Mapping[int, float] = {}
        self._profile = options.profile
        self._is_planned = False
        observer.sinks.append(self._collect)

    @property
    def profile(self) -> Profile | None:
        """The costs that the present plan was made from, if it was."""
        return self._profile if self._is_planned else None

    def measures_memory(self, step: int) -> bool:
        return self._profile is None and self._options.first_step <= step <= self._options.last_step

    def before_step(self, num_microbatches: int) -> Plan | None:
        """The plan to go on with, if a given profile is to be planned with now; a collective call."""
        if self._is_planned or self._profile is None:
            return None
        return self._decide(0, num_microbatches)

    def after_step(self, step: int, num_microbatches: int) -> Plan | None:
        """The plan to go on with, if there is a new one; a collective call."""
        options = self._options
        if not self._is_planned and step == options.last_step:
            self._observer.flush()
            self._edges = self._measure_edges()
            self._measure(self._profiler.costs())
            return self._decide(step, num_microbatches)
        if self._is_planned and options.threshold > 0 and step % _DRIFT_STEPS == 0:
            return self._look_for_drift(step, num_microbatches)
        return None

    def _collect(self, step: int, ops: Sequence[MeasuredOp]) -> None:
        if self._is_planned or step >= self._options.first_step:
            self._profiler.add(ops)

    def _measure(self, chunks: list[ChunkCosts]) -> None:
        placement = self._plan.placement
        costs, noise = gather_costs(placement, chunks, self._edges)
        self._profile = Profile(placement, costs, noise, self._options.model)
        self._profiler = Profiler(placement, self._rank)

    def _decide(self, step: int, num_microbatches: int) -> Plan | None:
        """Plan from the profile. The first rank plans for all, so that all run the same."""
        profile = self._profile
        assert profile is not None
        limit = self._limit_in_bytes(profile.costs, num_microbatches)
        plan: Plan | None = None
        if isinstance(self._plan, NamedPlan) and self._plan.adapts:
            plan = BroadcastPlan(self._plan.with_costs(profile.costs, limit))
        schedule = (plan or self._plan).schedule(num_microbatches)
        self._is_planned = True
        self._report(Report(Prediction(profile, schedule), plan is not None, limit, step))
        return plan

    def _look_for_drift(self, step: int, num_microbatches: int) -> Plan | None:
        self._observer.flush()
        chunks = self._profiler.costs()
        assert self._profile is not None
        change = torch.tensor([_largest_change(chunks, self._profile.costs)], device=self._device)
        dist.all_reduce(change, op=dist.ReduceOp.MAX)
        if change.item() <= self._options.threshold:
            self._profiler = Profiler(self._plan.placement, self._rank)
            return None
        old = self._profile
        self._measure(chunks)
        # Memory is measured in the first window only: it does not drift.
        costs = _with_memory_of(self._profile.costs, old.costs)
        self._profile = Profile(old.placement, costs, self._profile.noise, old.model)
        return self._decide(step, num_microbatches)

    def _limit_in_bytes(self, costs: StageCosts, num_microbatches: int) -> float | None:
        limit = self._options.memory_limit
        if limit is None:
            return None
        free = None
        if limit.multiple is None and limit.num_bytes is None:
            available = torch.tensor([_free_bytes(self._device) * _MARGIN], device=self._device)
            dist.all_reduce(available, op=dist.ReduceOp.MIN)
            free = int(available.item())
        return limit.in_bytes(self._plan.placement, costs, num_microbatches, free)


def _free_bytes(device: torch.device) -> int:
    """What the device could give to activations, between two steps, when none are alive."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _largest_change(chunks: Sequence[ChunkCosts], costs: StageCosts) -> float:
    """The largest relative change of a stage's F + B + W."""
    changes = [abs(sum(chunk.times.values()) / costs.work(chunk.stage) - 1.0) for chunk in chunks]
    return max(changes)


def _with_memory_of(times: StageCosts, memory: StageCosts) -> StageCosts:
    return StageCosts(
        times.time_f,
        times.time_b,
        times.time_w,
        memory.time_comm,
        memory.memory_f,
        memory.memory_b,
        memory.memory_w,
    )
