"""Where a fused backward is faster than B and W, planned schedules fuse them unless the previous stage waits for B."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.fused_backwards import (
    with_fused_backwards,
    with_separate_backwards,
    with_some_backwards_fused,
)
from megatron.zero_bubble.planner.generate import request_for, schedule_of
from megatron.zero_bubble.planner.request import QUICK_EFFORT
from megatron.zero_bubble.schedule import OpKind, Schedule, StageCosts, simulate, validate

COSTS = StageCosts.uniform(4, time_f=4, time_b=4, time_w=4, time_comm=0.1)
LIMIT = 4.0
"""The memory of 1F1B on four ranks, in which few W can be deferred."""


def kinds(schedule: Schedule) -> Counter[OpKind]:
    return Counter(op.kind for rank in range(schedule.num_ranks) for op in schedule.compute_ops(rank))


def planned(costs: StageCosts, **options: object) -> Schedule:
    return generate("auto", 4, 8, costs=costs, **{"memory_limit": LIMIT, **options})


def test_without_a_saving_the_plan_is_the_same():
    assert kinds(planned(COSTS))[OpKind.BW] == 0


@pytest.mark.parametrize(
    ("saved", "recompute", "limit"), [(0.2, "none", LIMIT), (1.0, "none", LIMIT), (1.0, "full", 1.5)]
)
def test_a_saving_shortens_the_plan_and_keeps_it_valid(saved, recompute, limit):
    costs = replace(COSTS, saved_bw=(saved,) * 4, time_r=(4,) * 4, memory_r=(0.9,) * 4)
    schedule = planned(costs, memory_limit=limit, recompute=recompute)
    assert schedule.recomputes == (recompute == "full")
    validate(schedule)
    counted = kinds(schedule)
    assert counted[OpKind.BW] > 0
    assert counted[OpKind.B] + counted[OpKind.BW] == counted[OpKind.W] + counted[OpKind.BW] == 4 * 8
    split = simulate(with_separate_backwards(schedule), costs)
    assert simulate(schedule, costs).makespan < split.makespan
    assert max(simulate(schedule, costs).peak_memory) <= limit * (1 + 1e-9)


def test_the_last_microbatch_of_a_planned_order_stays_apart():
    """Replicas reduce the gradients of each parameter right after its last W."""
    costs = replace(COSTS, saved_bw=(1.0,) * 4)
    schedule = with_separate_backwards(generate("zb-h1", 4, 8, costs=costs))
    fused = with_fused_backwards(schedule, request_for("auto", 4, 8, costs=costs).checked())
    assert kinds(fused)[OpKind.BW] > 0
    assert all(op.microbatch < 7 for lane in fused.ops for op in lane if op.kind is OpKind.BW)


def test_a_backward_that_the_previous_stage_waits_for_stays_split():
    """In GPipe's order every stage waits for every B, and the last stage has no other work."""
    costs = replace(COSTS, saved_bw=(0.01,) * 4)
    ops = tuple(tuple(op for op in with_separate_backwards(generate("gpipe", 4, 4)).ops[rank]) for rank in range(4))
    schedule = replace(generate("gpipe", 4, 4), ops=ops)
    fused = with_fused_backwards(schedule, request_for("auto", 4, 4, costs=costs).checked())
    on_last = [op for op in fused.ops[3] if op.kind is OpKind.BW]
    assert on_last == []
    assert [op.kind for op in fused.ops[0] if op.kind is OpKind.BW], "nobody waits for the first stage"


def test_while_costs_are_measured_every_second_backward_is_fused():
    schedule = with_some_backwards_fused(generate("1f1b", 4, 8))
    validate(schedule)
    for lane in schedule.ops:
        assert [op.microbatch for op in lane if op.kind is OpKind.BW] == [0, 2, 4, 6]
        assert [op.microbatch for op in lane if op.kind is OpKind.W] == [1, 3, 5, 7]


@pytest.mark.parametrize("name", ["zb-h1", "zb-2p", "zb-v"])
def test_named_schedules_keep_their_published_orders(name):
    costs = StageCosts.uniform(8 if name == "zb-v" else 4, saved_bw=0.5)
    assert kinds(generate(name, 4, 8, costs=costs))[OpKind.BW] == 0


def test_one_f_one_b_is_never_faster_than_the_plan():
    costs = replace(COSTS, saved_bw=(1.5,) * 4)
    own = simulate(generate("1f1b", 4, 8), costs).makespan
    assert simulate(planned(costs), costs).makespan <= own


def test_a_v_whose_b_adds_memory_is_planned():
    """A candidate has every W right after its B, so that B and W together add less memory."""
    costs = StageCosts.uniform(8, 2, 2, 2, 0.1, 0.1, 0.05, -0.15, saved_bw=0.5)
    schedule = generate(
        "auto", 4, 12, costs=costs, placement_kind="v", num_chunks=2, memory_limit=0.7, effort=QUICK_EFFORT
    )
    validate(schedule)
    assert max(simulate(schedule, costs).peak_memory) <= 0.7
    assert kinds(schedule)[OpKind.BW] > 0


@pytest.mark.parametrize("seed", [41, 51, 78])
def test_schedules_are_compared_by_the_time_that_the_planner_compares(seed):
    """Fused backwards shorten the longest span of a rank, and leave the makespan as it is."""
    draw = Random(seed)
    times = {name: tuple(draw.uniform(1, 9) for _ in range(4)) for name in ("time_f", "time_b", "time_w")}
    costs = replace(COSTS, **times, saved_bw=tuple(draw.uniform(0, 0.4) * time for time in times["time_w"]))
    request = request_for("auto", 4, 8, costs=costs, effort=2000)
    apart = with_separate_backwards(schedule_of(request))
    before = simulate(apart, costs)
    after = simulate(with_fused_backwards(apart, request.checked()), costs)
    assert after.makespan == pytest.approx(before.makespan)
    assert after.cost < before.cost * (1 - 1e-9)
