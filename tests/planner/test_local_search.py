"""The local search makes valid plans within the limit that are never worse than the one it begins with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.critical_paths import run_in_order
from megatron.zero_bubble.planner.local_search import improve
from megatron.zero_bubble.planner.orders import one_by_one, schedule_of_orders
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule import Placement, StageCosts, simulate
from megatron.zero_bubble.schedule.recomputation import Recompute, num_recomputed
from tests.planner.planning import checked, random_costs
from tests.schedule.random_schedules import placements


@settings(max_examples=40, deadline=None)
@given(st.data(), placements, st.integers(1, 5), st.booleans(), st.sampled_from(Recompute), st.floats(1, 3))
def test_any_placement_gets_a_plan_that_is_valid_fits_and_is_no_worse(data, placement, m, overlap, recompute, room):
    costs = data.draw(random_costs(placement.num_stages))
    costs = replace(costs, time_r=costs.time_f, memory_r=costs.memory_f)
    problem = Problem(placement, m, costs, (1.0,) * placement.num_ranks, overlap, recompute)
    limits = tuple(room * limit for limit in problem.smallest_limits)
    problem = replace(problem, limits=limits)
    begin = run_in_order(problem, one_by_one(problem))
    plan, _ = improve(problem, begin, 100_000)
    schedule = schedule_of_orders(problem, plan.orders)
    checked(schedule, costs)
    timeline = simulate(schedule, costs, overlap_communication=overlap)
    assert (plan.cost, plan.tie) == problem.judged(timeline.cost, timeline.makespan)
    assert plan.cost <= begin.cost
    if recompute is not Recompute.PLANNED:
        assert num_recomputed(schedule) == num_recomputed(schedule_of_orders(problem, begin.orders))
    for peak, limit in zip(timeline.peak_memory, limits, strict=True):
        assert peak <= limit * (1 + 1e-9)


def test_one_microbatch_after_the_other_becomes_a_pipeline():
    problem = Problem(Placement("linear", 3), 6, StageCosts.uniform(3), (3.0,) * 3)
    begin = run_in_order(problem, one_by_one(problem))
    plan, left = improve(problem, begin, 100_000)
    assert plan.cost < 0.7 * begin.cost
    assert left > 0, "it ends where nothing gets better"


@pytest.mark.parametrize(("held", "before", "after"), [(5, 117, 115), (6, 117, 110)])
def test_a_v_between_the_named_limits_uses_the_memory_that_it_has(held, before, after):
    """Without the search both plans take 117: slots of a block stay empty while the pipeline fills and drains."""
    costs = StageCosts.uniform(16, memory_f=0.5, memory_b=-0.25, memory_w=-0.25)
    timeline = checked(generate("zb-v", 8, 16, costs=costs, memory_limit=held), costs)
    assert timeline.cost <= after < before
    assert max(timeline.peak_memory) <= held
