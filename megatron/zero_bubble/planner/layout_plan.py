"""Plans the schedule of a model's layout, in the memory that parameters, gradients and optimizer states leave free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

from megatron.zero_bubble.planner.expected_time import slowdown
from megatron.zero_bubble.planner.generate import schedule_of
from megatron.zero_bubble.planner.request import Layout, PlanRequest
from megatron.zero_bubble.schedule.costs import SMALLEST
from megatron.zero_bubble.schedule.default_costs import with_host_link
from megatron.zero_bubble.schedule.errors import Infeasible, enough
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Timeline


@dataclass(frozen=True)
class Plan:
    """A layout with its planned schedule.

    Attributes:
        request: the request for only this layout, with the costs of the layout's stages.
        layout: placement, partition, recomputation and vocabulary parallelism.
        timeline: the simulation of the schedule.
        states: rank -> memory of parameters, gradients and optimizer states.
        activations: rank -> peak memory of activations; None to use the peak memory of `timeline`.
        slowdown: expected time with varying durations, divided by the simulated time.
        is_draft: whether the plan was made with little effort, because another combination (see `Layout.combination`)
            was faster. A search of the plan's combination alone may find a faster plan.
        others: the best plans of other layouts, the fastest first.
    """

    request: PlanRequest
    layout: Layout
    timeline: Timeline
    states: tuple[float, ...]
    activations: tuple[float, ...] | None = None
    slowdown: float = 1.0
    is_draft: bool = False
    others: tuple[Plan, ...] = ()

    @property
    def time(self) -> float:
        """The predicted time of a step without the optimizer, in the unit of the costs.

        With post-validation, ranks start iterations without waiting for each other, so that the time of a step is the
        longest span of a rank. Without post-validation, the time of a step is the makespan.
        """
        return self.slowdown * self.request.time_of(self.timeline)

    @cached_property
    def memory(self) -> float:
        """Largest memory of a rank: model states plus the peak memory of activations, in the unit of the costs."""
        return max(map(add, self.states, self.activations or self.timeline.peak_memory))


def plan_layout(request: PlanRequest, layout: Layout) -> Plan:
    """Plan the schedule of one layout of a model.

    Returns:
        The plan, with the simulated schedule.

    Raises:
        Infeasible: no schedule fits in the memory limits. The attribute `smallest_limit` of the error is a memory limit
            for activations in which a schedule fits. If the request has a memory capacity but no memory limit,
            `smallest_limit` is a memory capacity in which a schedule fits.
        ScheduleError: no schedule with the requested name exists for the layout.
    """
    model = model_of(request, layout)
    states = model.states(layout.partition, layout.placement)
    costs = model.of_stages(layout.partition, layout.placement)
    fixed = replace(
        request,
        placements=(layout.placement,),
        costs=costs if request.host_rate is None else with_host_link(costs, request.host_rate),
        partition=layout.partition,
        recomputes=(layout.recompute,),
        pairs=pairs_in(request, layout),
        vocabulary_parallel=layout.vocabulary_parallel,
        spread=model.spread,
        time_between=model.time_between,
        group_size=request.group_size if layout.placement.kind == "interleaved" else None,
    )
    capacity = request.capacity_of(layout)
    try:
        fixed = fixed.within(limits_of(request, states, capacity))
        schedule = schedule_of(fixed)
    except Infeasible:
        if capacity is None or request.memory_limit is not None:
            raise
        raise _beyond_capacity(fixed, states, capacity) from None
    timeline = simulate(schedule, fixed.stage_costs, overlap_communication=request.overlap_communication)
    return Plan(fixed, layout, timeline, states)


def _beyond_capacity(fixed: PlanRequest, states: Sequence[float], capacity: float) -> Infeasible:
    """The error for a layout whose parameters, gradients, optimizer states and activations exceed the memory capacity.

    To find the memory that the activations of each rank need, the function plans the layout with almost no memory, and
    reads the smallest limits in the resulting error.
    """
    needed = max(states)
    try:
        schedule_of(replace(fixed.within((SMALLEST,) * fixed.num_ranks), offloads=False))
    except Infeasible as error:
        needed = max(map(add, states, error.of_ranks or (error.smallest_limit,) * fixed.num_ranks))
    return Infeasible(
        f"parameters, gradients, optimizer states and activations take more than the {capacity:g} of a rank; "
        f"{enough(needed)} for every rank",
        needed,
    )


def with_slowdown(plan: Plan) -> Plan:
    """The plan with its field `slowdown` computed from `spread` and `time_between` of the plan's request."""
    return replace(plan, slowdown=slowdown(plan.timeline, plan.request.spread, plan.request.time_between))


def pairs_in(request: PlanRequest, layout: Layout) -> bool:
    """Whether plans of the layout may run a forward and a backward as a pair; false with vocabulary shards."""
    return request.pairs and not layout.vocabulary_parallel


def model_of(request: PlanRequest, layout: Layout) -> ModelCosts:
    """The costs of the model's units in a layout, with vocabulary shards if the layout has vocabulary shards."""
    return request.model.vocabulary_parallel(request.num_ranks) if layout.vocabulary_parallel else request.model


def computing_of(request: PlanRequest, layout: Layout) -> ModelCosts:
    """The costs of the model's units; if the layout may use pairs, exchanges of tokens between experts take no time."""
    model = model_of(request, layout)
    return model.computing if pairs_in(request, layout) else model


def limits_of(request: PlanRequest, states: Sequence[float], capacity: float | None) -> tuple[float, ...] | None:
    """Rank -> memory limit of activations: the smaller of the request's limit and the memory that model states leave.

    Raises:
        Infeasible: parameters, gradients and optimizer states of a rank take more than the memory capacity.
    """
    limits = request.limits
    if capacity is None:
        return limits
    if not max(states) <= capacity:  # true for a NaN capacity, too
        raise Infeasible(
            f"parameters, gradients and optimizer states need {max(states):g} of the {capacity:g} of a rank",
            max(states),
        )
    left = tuple(max(capacity - state, SMALLEST) for state in states)
    return left if limits is None else tuple(map(min, limits, left))
