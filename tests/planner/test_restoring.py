"""Where a rank is short of memory, the planner chooses in how many groups of layers its stages restore activations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.bounds import lower_bound
from megatron.zero_bubble.planner.layouts import search_layouts
from megatron.zero_bubble.planner.registry import placement_for
from megatron.zero_bubble.planner.request import Layout, PlanRequest
from megatron.zero_bubble.schedule import Infeasible, Placement, simulate, validate
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute

NUM_RANKS, NUM_MICROBATCHES = 4, 12


def costs_of(name, blocks):
    placement = placement_for(name, NUM_RANKS)
    costs = default_costs(placement, Recompute.FULL)
    return replace(costs, num_blocks=(blocks // placement.num_chunks,) * placement.num_stages)


@cache
def planned(name, blocks, limit, recompute=Recompute.FULL):
    costs = costs_of(name, blocks)
    options = {"recompute": recompute, "takes_makespan": True, "effort": 30_000}
    schedule = generate(name, NUM_RANKS, NUM_MICROBATCHES, costs=costs, memory_limit=limit, **options)
    validate(schedule)
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    assert timeline.cost >= lower_bound(schedule.placement, NUM_MICROBATCHES, costs, limit, recompute) * (1 - 1e-9)
    return timeline


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.PLANNED])
@pytest.mark.parametrize(("name", "limit"), [("auto", 0.5), ("1f1b", 0.6), ("zb-v", 0.25)])
def test_in_half_of_one_microbatch_of_a_stage_the_fewest_groups_that_help_are_chosen(name, limit, recompute):
    if name == "1f1b" and recompute is Recompute.PLANNED:
        pytest.skip("1f1b plans nothing")
    with pytest.raises(Infeasible):
        planned(name, 1, limit, recompute)
    timeline = planned(name, 8, limit, recompute)
    assert min(timeline.schedule.groups) > 1
    assert all(groups <= 8 // timeline.schedule.num_chunks for groups in timeline.schedule.groups)


def test_less_memory_takes_more_groups_and_more_time():
    timelines = [planned("auto", 8, limit) for limit in (2.2, 0.9, 0.6, 0.4)]
    assert [max(timeline.schedule.groups, default=1) for timeline in timelines] == [1, 2, 4, 8]
    makespans = [timeline.makespan for timeline in timelines]
    assert makespans == sorted(makespans)


@pytest.mark.parametrize("limit", [1.05, 1.3, 2.0, 3.0])
@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.PLANNED])
def test_a_plan_that_may_have_groups_is_never_slower_than_one_that_may_not(limit, recompute):
    assert planned("auto", 8, limit, recompute).makespan <= planned("auto", 1, limit, recompute).makespan * (1 + 1e-9)


def test_where_memory_is_not_short_and_where_nothing_is_recomputed_blocks_change_nothing():
    assert planned("auto", 8, 2.0).schedule == planned("auto", 1, 2.0).schedule
    assert planned("auto", 8, 3, Recompute.NONE).schedule == planned("auto", 1, 3, Recompute.NONE).schedule


def test_only_the_ranks_that_are_short_have_groups():
    costs = costs_of("auto", 8)
    limits = (3.0, 3.0, 3.0, 0.4)
    schedule = generate(
        "auto", NUM_RANKS, NUM_MICROBATCHES, costs=costs, memory_limit=limits, recompute=Recompute.FULL, effort=0
    )
    assert schedule.groups[:3] == (1, 1, 1)
    assert schedule.groups[3] > 1


def test_the_smallest_limit_that_works_is_that_of_single_blocks():
    with pytest.raises(Infeasible) as error:
        planned("auto", 8, 0.1)
    smallest = error.value.smallest_limit
    assert smallest < 0.25
    assert max(planned("auto", 8, smallest).peak_memory) <= smallest * (1 + 1e-9)


def test_layers_that_fit_only_in_groups_are_placed():
    layer = UnitCosts(1, 1, 0.8, memory_f=1, memory_b=-0.5, memory_w=-0.5, time_r=1, memory_r=0.9, num_blocks=1)
    model = ModelCosts(UnitCosts(0.1, 0, 0.1), (layer,) * 8, UnitCosts(0.2, 0.2, 0.2))
    placement = Placement("linear", 2)
    request = PlanRequest(
        "auto", 4, (placement,), model, recomputes=(Recompute.FULL,), memory_limit=2.0, takes_makespan=True, effort=0
    )
    plan = search_layouts(request)
    assert plan.timeline.schedule.groups
    assert max(plan.timeline.peak_memory) <= 2.0
    whole = replace(model, layers=(replace(layer, num_blocks=0),) * 8)
    with pytest.raises(Infeasible):
        search_layouts(replace(request, costs=whole))
    assert isinstance(plan.layout, Layout)
