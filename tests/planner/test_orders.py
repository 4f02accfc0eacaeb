"""Orders of codes and schedules say the same, and microbatches one by one need the least memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.orders import one_by_one, orders_of_schedule, schedule_of_orders
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.schedule import OpKind, Placement, StageCosts, simulate
from megatron.zero_bubble.schedule.recomputation import Recompute
from tests.planner.planning import checked, random_costs
from tests.schedule.random_schedules import placements


def problem(placement: Placement, m: int, costs: StageCosts, recompute: Recompute = Recompute.NONE) -> Problem:
    return Problem(placement, m, costs, (100.0,) * placement.num_ranks, recompute=recompute)


@settings(max_examples=30, deadline=None)
@given(st.data(), placements, st.integers(1, 5))
def test_one_microbatch_after_the_other_needs_the_smallest_limits(data, placement, m):
    given_costs = data.draw(random_costs(placement.num_stages))
    of_one = problem(placement, m, given_costs)
    schedule = checked(schedule_of_orders(of_one, one_by_one(of_one)), given_costs).schedule
    assert simulate(schedule, given_costs).peak_memory == of_one.smallest_limits


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zb-2p", {}),
        ("zb-v", {}),
        ("zb-h1", {"recompute": Recompute.FULL}),
        ("zb-h1", {"vocabulary_parallel": True}),
    ],
)
def test_a_schedule_and_its_orders_say_the_same(name, options):
    schedule = generate(name, 3, 6, **options)
    costs = StageCosts.uniform(schedule.num_stages, time_r=1, memory_r=0.8)
    if options.get("vocabulary_parallel"):
        costs = costs.with_shards(schedule.placement, {"time_s": 0.5, "time_t": 0.2})
    planned = problem(schedule.placement, 6, costs, options.get("recompute", Recompute.NONE))
    assert schedule_of_orders(planned, orders_of_schedule(planned, schedule)).ops == schedule.ops


def test_a_fused_backward_becomes_b_and_w():
    fused = generate("1f1b", 2, 2)
    planned = problem(fused.placement, 2, StageCosts.uniform(2))
    split = schedule_of_orders(planned, orders_of_schedule(planned, fused))
    assert [op.kind for op in split.ops[1]] == [OpKind.F, OpKind.B, OpKind.W] * 2
