"""Time and memory of Megatron's split of a model into stages, under megatron-core's own schedule."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf

from megatron.zero_bubble.planner.layout_plan import Plan, plan_layout, with_slowdown
from megatron.zero_bubble.planner.prediction import as_megatron_recomputes, memory_in_megatron
from megatron.zero_bubble.planner.request import Layout, PlanRequest
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.model_costs import spread_layers
from megatron.zero_bubble.schedule.recomputation import Recompute

_NAMES = {"linear": "1f1b", "interleaved": "interleaved-1f1b"}
"""Kind of placement -> name of megatron-core's own schedule for this kind."""


def megatrons_layout(
    num_layers: int, num_ranks: int, num_chunks: int = 1, recompute: Recompute = Recompute.NONE
) -> Layout:
    """The layout that Megatron's flags give, with the layers spread as evenly as possible over the stages.

    Args:
        num_chunks: number of model chunks per rank; the placement is interleaved if a rank has several chunks.

    Raises:
        ScheduleError: there are fewer layers than stages.
    """
    placement = Placement("linear" if num_chunks == 1 else "interleaved", num_ranks, num_chunks)
    return Layout(placement, spread_layers(num_layers, placement.num_stages), recompute)


def on_megatrons_split(request: PlanRequest, chosen: Plan) -> tuple[Plan, ...]:
    """Two plans of the layout `request.usual`: with the request's schedule, and with megatron-core's own schedule.

    Args:
        request: a request whose field `usual` is not None.
        chosen: the plan that `search_layouts` returned for the request. If `chosen` or a plan in `chosen.others` has
            the layout `request.usual`, and is no draft, that plan is returned as the plan with the request's schedule.

    Returns:
        At most two plans; a plan that does not exist or does not fit in memory is left out.
    """
    usual = request.usual
    assert usual is not None
    plans = [plan for plan in (chosen, *chosen.others) if plan.layout == usual and not plan.is_draft]
    with suppress(ScheduleError):
        plans = plans or [with_slowdown(plan_layout(request, usual))]
    with suppress(ScheduleError):
        plans.append(as_megatron_runs(request, usual))
    return tuple(plans)


def in_megatrons_order(request: PlanRequest) -> PlanRequest | None:
    """The given request with megatron-core's own schedule for its layout; None if megatron-core has no such schedule.

    Args:
        request: a request with one placement, and with one value in the field `recomputes`.
    """
    name = _NAMES.get(request.placement.kind)
    if name is None or request.vocabulary_parallel or request.pairs:
        return None
    recompute = Recompute.NONE if request.recompute is Recompute.PLANNED else request.recompute
    return replace(request, schedule=name, recomputes=(recompute,), offloads=False, spread=0.0, time_between=0.0)


def as_megatron_runs(request: PlanRequest, layout: Layout) -> Plan:
    """The plan of a layout with megatron-core's own schedule.

    Under full recomputation every backward recomputes its activations. With `Recompute.PLANNED` every microbatch keeps
    all its activations, because megatron-core does not plan recomputation for a memory limit.

    Raises:
        Infeasible: megatron-core's schedule exceeds the memory limit.
        ScheduleError: megatron-core has no schedule for this number of microbatches, or the placement is V-shaped.
    """
    if layout.placement.kind == "v":
        raise ScheduleError("megatron-core has no schedule for a V")
    plan = _own(request, layout)
    own = as_megatron_recomputes(plan.timeline)
    return with_slowdown(replace(plan, timeline=own, activations=memory_in_megatron(plan.timeline)))


def time_of_usual(request: PlanRequest) -> float:
    """Step time of the layout `request.usual` under megatron-core's schedule; infinity without a schedule that fits."""
    with suppress(ScheduleError):
        if request.usual is not None:
            return as_megatron_runs(request, request.usual).time
    return inf


def _own(request: PlanRequest, layout: Layout) -> Plan:
    """The plan of megatron-core's own schedule; under full recomputation R and B are separate operations."""
    name = _NAMES[layout.placement.kind]
    whole_groups = request.num_microbatches % layout.placement.num_ranks == 0
    if request.pairs and layout.placement.kind == "interleaved" and whole_groups:
        name = "interleaved-pairs"
    if layout.recompute is Recompute.PLANNED:
        layout = replace(layout, recompute=Recompute.NONE)
    return plan_layout(replace(request, schedule=name, offloads=False), layout)


def capacity_of_multiple(
    request: PlanRequest, layout: Layout, multiple: float, *, is_interleaved: bool = False
) -> float:
    """The memory capacity in which a multiple of 1F1B's activation memory fits on every rank.

    For each rank of Megatron's split, the function adds the memory of parameters, gradients and optimizer states to
    `multiple` times the peak memory of activations; the capacity is the largest of these sums. See `memory_of_ranks`.

    Returns:
        The memory capacity, in the unit of the costs.
    """
    memory = memory_of_ranks(request, layout, is_interleaved=is_interleaved)
    return max(state + multiple * activations for state, activations in memory)


def memory_of_ranks(request: PlanRequest, layout: Layout, *, is_interleaved: bool = False) -> list[tuple[float, float]]:
    """The memory of each rank under 1F1B: of parameters, gradients and optimizer states, and of activations (peak).

    Args:
        is_interleaved: whether the peak memory of interleaved 1F1B is multiplied if the layout has several chunks per
            rank. If `is_interleaved` is false, or there are fewer microbatches than ranks, the peak memory of 1F1B is
            multiplied, with one chunk per rank and as many layers on each rank as in `layout`.
    """
    request = replace(request.within(None), capacity=None, usual_capacity=None)
    placement = layout.placement
    if not is_interleaved or request.num_microbatches < placement.num_ranks:
        partition = tuple(map(int, placement.sums(layout.partition)))
        layout = replace(layout, placement=Placement("linear", placement.num_ranks), partition=partition)
    elif rest := request.num_microbatches % (size := request.group_size or placement.num_ranks):
        request = replace(request, num_microbatches=request.num_microbatches + size - rest)
    plan = _own(request, layout)
    return list(zip(plan.states, plan.timeline.peak_memory, strict=True))
