"""Megatron's split of a model: its time under megatron-core's own schedule, and the memory limits that follow."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from megatron.zero_bubble.planner.layout_plan import Plan, plan_layout, with_slowdown
from megatron.zero_bubble.planner.prediction import as_megatron_recomputes, memory_in_megatron
from megatron.zero_bubble.planner.request import Layout, PlanRequest
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.model_costs import spread_layers
from megatron.zero_bubble.schedule.recomputation import Recompute


def megatrons_layout(
    num_layers: int, num_ranks: int, num_chunks: int = 1, recompute: Recompute = Recompute.NONE
) -> Layout:
    """The layout of Megatron's flags: as many layers on every stage, or as evenly as they can be spread.

    Raises:
        ScheduleError: there are fewer layers than stages.
    """
    placement = Placement("linear" if num_chunks == 1 else "interleaved", num_ranks, num_chunks)
    return Layout(placement, spread_layers(num_layers, placement.num_stages), recompute)


def on_megatrons_split(request: PlanRequest, chosen: Plan) -> tuple[Plan, ...]:
    """The plans of the usual layout with the schedule of the request and with megatron-core's own, where they fit.

    Args:
        chosen: the result of the search for the request, whose plan of the usual layout is taken if it has one.
    """
    usual = request.usual
    assert usual is not None
    plans = [plan for plan in (chosen, *chosen.others) if plan.layout == usual]
    with suppress(ScheduleError):
        plans = plans or [with_slowdown(plan_layout(request, usual))]
    with suppress(ScheduleError):
        plans.append(as_megatron_runs(request, usual))
    return tuple(plans)


def as_megatron_runs(request: PlanRequest, layout: Layout) -> Plan:
    """The plan of megatron-core's own schedule, whose backwards recompute.

    Activations that are recomputed only because of the memory limit are kept, because megatron-core would keep them.

    Raises:
        ScheduleError: it has none for so many microbatches or for a V, or (as `Infeasible`) it does not fit.
    """
    if layout.placement.kind == "v":
        raise ScheduleError("megatron-core has no schedule for a V")
    plan = _own(request, layout)
    own = as_megatron_recomputes(plan.timeline)
    return with_slowdown(replace(plan, timeline=own, activations=memory_in_megatron(plan.timeline)))


def _own(request: PlanRequest, layout: Layout) -> Plan:
    """The plan of megatron-core's own schedule, with R apart from the backwards where everything is recomputed."""
    name = "1f1b" if layout.placement.kind == "linear" else "interleaved-1f1b"
    whole_groups = request.num_microbatches % layout.placement.num_ranks == 0
    if request.pairs and layout.placement.kind == "interleaved" and whole_groups:
        name = "interleaved-pairs"
    if layout.recompute is Recompute.PLANNED:
        layout = replace(layout, recompute=Recompute.NONE)
    return plan_layout(replace(request, schedule=name, offloads=False), layout)


def capacity_of_multiple(
    request: PlanRequest, layout: Layout, multiple: float, *, is_interleaved: bool = False
) -> float:
    """The memory of states, and `multiple` times that of activations, on the fullest rank of Megatron's split.

    Args:
        layout: Megatron's.
        is_interleaved: whether the activations are those of interleaved 1F1B, where the layout has several chunks, and
            not those of 1F1B with the same layers on every rank.
    """
    request = replace(request.within(None), capacity=None, usual_capacity=None)
    placement = layout.placement
    if not is_interleaved or request.num_microbatches < placement.num_ranks:
        partition = tuple(
            sum(layout.partition[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)
        )
        layout = replace(layout, placement=Placement("linear", placement.num_ranks), partition=partition)
    plan = _own(request, layout)
    memory = zip(plan.states, plan.timeline.peak_memory, strict=True)
    return max(state + multiple * activations for state, activations in memory)
