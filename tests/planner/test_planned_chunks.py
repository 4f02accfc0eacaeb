"""What `auto` plans for several chunks a rank: valid under every limit, and never worse than the named schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.orders import schedule_of_orders
from megatron.zero_bubble.planner.planned_chunks import plan_chunks
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule import Infeasible, OpKind, Placement, ScheduleError, StageCosts, simulate
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute
from tests.planner.planning import LITTLE, checked, wild_costs

NAMED = ("interleaved-1f1b", "interleaved-zb")


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.integers(2, 3), st.booleans(), st.booleans())
def test_no_named_schedule_that_fits_is_better(data, p, m, v, overlap, interlocks):
    """Plans are compared by what an iteration takes: the longest span if iterations interlock, else the makespan."""
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
        limited = {"memory_limit": limits, "post_validation": interlocks}
        planned = generate("auto", p, m, num_chunks=v, costs=costs, **limited, **options)
    except Infeasible:
        assert not named
        return
    checked(planned, costs)
    timeline = simulate(planned, costs, **options)
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True))
    times = [one.cost if interlocks else one.makespan for one in (timeline, *named)]
    assert times[0] <= min(times) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(2, 3), st.booleans(), st.booleans())
def test_the_planner_knows_what_its_plans_cost(data, p, m, v, overlap, takes_makespan):
    placement = Placement("interleaved", p, v)
    costs = data.draw(wild_costs(placement.num_stages))
    problem = Problem(placement, m, costs, (1000,) * p, overlap, takes_makespan=takes_makespan)
    plan = plan_chunks(problem).best
    timeline = simulate(schedule_of_orders(problem, plan.orders), costs, overlap_communication=overlap)
    assert plan.cost == (timeline.makespan if takes_makespan else timeline.cost)
    assert plan.cost >= problem.bound


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("m", [1, 3, 5, 8])
@pytest.mark.parametrize("recompute", Recompute)
def test_any_number_of_microbatches_is_planned_in_any_memory(v, m, recompute):
    """megatron-core's interleaved schedule needs a multiple of the ranks."""
    costs = default_costs(Placement("interleaved", 4, v), recompute)
    options = {"num_chunks": v, "costs": costs, "recompute": recompute, "effort": LITTLE}
    with pytest.raises(Infeasible, match="rank 0 needs at least") as error:
        generate("auto", 4, m, memory_limit=0.1, **options)
    for limit in (error.value.smallest_limit, 4, 100):
        checked(generate("auto", 4, m, memory_limit=limit, **options), costs)


def forwards(schedule, rank):
    return [op for op in schedule.ops[rank] if op.kind is OpKind.F]


@pytest.mark.parametrize("group_size", [4, 6])
def test_forwards_keep_the_order_of_given_groups_where_that_fits(group_size):
    """In the order of megatron-core's groups dropout draws the numbers that it draws there."""
    costs = StageCosts.uniform(8, 1, 1, 0.7, 0.5, 0.5, -0.25, -0.25)
    options = {"num_chunks": 2, "costs": costs, "group_size": group_size, "effort": LITTLE}
    named = generate("interleaved-1f1b", 4, 12, num_chunks=2, group_size=group_size)
    for limit in (5.5, 20):
        planned = generate("auto", 4, 12, memory_limit=limit, **options)
        assert [forwards(planned, rank) for rank in range(4)] == [forwards(named, rank) for rank in range(4)]
    planned, free = (
        generate("auto", 4, 12, memory_limit=2, **{**options, **other}) for other in ({}, {"group_size": None})
    )
    assert planned == free


@pytest.mark.parametrize("limit", [2.6, 3.2])
def test_forwards_keep_the_order_of_given_groups_where_recomputation_makes_it_fit(limit):
    costs = StageCosts.uniform(8, 1, 1, 0.7, 0.5, 0.5, -0.25, -0.25, time_r=1, memory_r=0.45)
    options = {"num_chunks": 2, "costs": costs, "memory_limit": limit, "recompute": Recompute.PLANNED}
    named = generate("interleaved-1f1b", 4, 16, num_chunks=2, group_size=4)
    planned = generate("auto", 4, 16, group_size=4, effort=20_000, **options)
    assert planned.recomputes
    assert [forwards(planned, rank) for rank in range(4)] == [forwards(named, rank) for rank in range(4)]


@pytest.mark.parametrize("group_size", [2, 4])
def test_with_vocabulary_shards_other_groups_are_planned_where_the_given_groups_do_not_fit(group_size):
    """Rank 0 has less memory than the five forwards of megatron-core's order keep."""
    shard = {"time_e": 0.1, "time_ew": 0.1, "time_s": 0.4, "time_t": 0.2, "memory_s": 0.2, "memory_t": -0.2}
    costs = StageCosts.uniform(4, 1, 1, 0.4, 0.05, 1, -0.6, -0.4).with_shards(Placement("interleaved", 2, 2), shard)
    options = {"num_chunks": 2, "costs": costs, "vocabulary_parallel": True, "group_size": group_size}
    planned = generate("auto", 2, 6, memory_limit=4.5, **options)
    assert max(peak_memory(planned, costs)) <= 4.5
    checked(planned, costs)


def test_in_two_thirds_of_the_memory_of_1f1b_later_ranks_keep_fewer_microbatches():
    """The time was 24% above the bound while only memory limited the number of microbatches in flight."""
    placement = Placement("linear", 16)
    costs = StageCosts.uniform(16, 1, 1.09, 0.53, 0.05, 1, -0.31, -0.69)
    problem = Problem(placement, 32, costs, (10.51,) * 16, budget=75_000)
    plan = plan_chunks(problem).best
    assert plan.cost <= 1.2 * problem.bound
    timeline = simulate(schedule_of_orders(problem, plan.orders), costs)
    assert max(timeline.peak_memory) <= 10.51
    assert timeline.peak_memory[-1] < timeline.peak_memory[0] / 2


def test_stages_without_activation_memory_are_planned():
    costs = StageCosts.uniform(6, 1, 1, 1, 0, memory_f=0, memory_b=0, memory_w=0)
    checked(generate("auto", 3, 6, num_chunks=2, costs=costs), costs)
