"""What `auto` plans for several chunks a rank: valid under every limit, and never worse than the named schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import checked, wild_costs

from megatron.zero_bubble.schedule import Infeasible, Placement, ScheduleError, StageCosts, generate, simulate
from megatron.zero_bubble.schedule.generators import default_costs
from megatron.zero_bubble.schedule.generators.planned_interleaved import plan_interleaved
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.search.problem import Problem

NAMED = ("interleaved-1f1b", "interleaved-zb")


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 9), st.integers(2, 4), st.booleans())
def test_no_named_schedule_that_fits_is_better(data, p, m, v, overlap):
    costs = data.draw(wild_costs(p * v))
    limits = [data.draw(st.integers(1, 8 * p)) for _ in range(p)]
    options = {"overlap_communication": overlap}
    named = []
    for name in NAMED:
        try:
            named.append(
                simulate(generate(name, p, m, num_chunks=v, costs=costs, memory_limit=limits), costs, **options)
            )
        except ScheduleError:  # it does not fit, or megatron-core has none for so many microbatches
            continue
    try:
        planned = generate("auto", p, m, num_chunks=v, costs=costs, memory_limit=limits, **options)
    except Infeasible:
        assert not named
        return
    checked(planned, costs)
    timeline = simulate(planned, costs, **options)
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
    for other in named:
        assert timeline.cost <= other.cost * (1 + 1e-9), other.schedule.name


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(2, 3), st.booleans())
def test_the_planner_knows_what_its_plans_cost(data, p, m, v, overlap):
    placement = Placement("interleaved", p, v)
    costs = data.draw(wild_costs(placement.num_stages))
    problem = Problem(placement, m, costs, (1000,) * p, overlap)
    plan = plan_interleaved(problem)
    timeline = simulate(problem.schedule("planned", plan.orders), costs, overlap_communication=overlap)
    assert plan.cost == timeline.cost
    assert plan.cost >= problem.bound


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("m", [1, 3, 5, 8])
@pytest.mark.parametrize("recompute", Recompute)
def test_any_number_of_microbatches_is_planned_in_any_memory(v, m, recompute):
    """megatron-core's interleaved schedule needs a multiple of the ranks."""
    costs = default_costs(Placement("interleaved", 4, v), recompute)
    with pytest.raises(Infeasible, match="rank 0 needs at least") as error:
        generate("auto", 4, m, num_chunks=v, costs=costs, memory_limit=0.1, recompute=recompute)
    for limit in (error.value.smallest_limit, 4, 100):
        checked(generate("auto", 4, m, num_chunks=v, costs=costs, memory_limit=limit, recompute=recompute), costs)


def test_groups_are_those_of_the_named_schedules():
    costs = StageCosts.uniform(8, 1, 1, 1, 0.5, 0.5, -0.25, -0.25)
    options = {"num_chunks": 2, "costs": costs}
    planned = generate("auto", 4, 12, group_size=6, **options)
    named = simulate(generate("interleaved-zb", 4, 12, num_chunks=2, group_size=6), costs)
    assert simulate(planned, costs).cost <= named.cost
    with pytest.raises(ScheduleError, match="groups of 4"):
        generate("auto", 4, 12, group_size=3, **options)
