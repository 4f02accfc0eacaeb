from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.run_schedules import RunSchedules, prepare
from megatron.zero_bubble.schedule import (
    Op,
    OpKind,
    Placement,
    Schedule,
    ScheduleError,
    StageCosts,
    lower,
    with_post_validation,
)


def test_a_named_plan_makes_a_lowered_schedule_for_any_number_of_microbatches():
    plan = RunSchedules.named("zb-h1", 4)
    assert plan.placement == Placement("linear", 4)
    for m in (1, 4, 9):
        schedule = plan.schedule(m)
        assert (schedule.name, schedule.num_microbatches, schedule.is_lowered) == ("zb-h1", m, True)


def test_chunks_and_group_size_reach_the_generator():
    plan = RunSchedules.named("interleaved-1f1b", 2, num_chunks=3).requesting(group_size=4)
    assert plan.placement == Placement("interleaved", 2, 3)
    expected = generate("interleaved-1f1b", 2, 8, num_chunks=3, group_size=4)
    assert plan.schedule(8).without_communication() == expected


@pytest.mark.parametrize(("name", "adapts"), [("auto", True), ("1f1b", False), ("zb-h2", False)])
def test_whether_a_plan_adapts_to_costs(name, adapts):
    assert RunSchedules.named(name, 2).adapts is adapts


def test_measured_costs_and_limit_take_the_place_of_the_old():
    costs = StageCosts.uniform(2, 3, 2, 1, memory_f=100, memory_b=-40, memory_w=-60)
    plan = RunSchedules.named("auto", 2).requesting(memory_limit=2.0).requesting(costs=costs, memory_limit=300.0)
    assert (plan.costs, plan.request.memory_limit) == (costs, 300.0)
    assert plan.schedule(4).without_communication() == generate("auto", 2, 4, costs=costs, memory_limit=300.0)


def test_a_limit_below_what_the_schedule_needs_is_refused_with_what_is_enough():
    with pytest.raises(ScheduleError, match=r"^on rank 0 schedule zb-h2 needs 3 of memory, above the limit of 2; 3 is"):
        RunSchedules.named("zb-h2", 2).requesting(memory_limit=2.0).schedule(4)


def test_a_fixed_plan_serves_its_own_number_of_microbatches():
    given = replace(generate("zb-h1", 2, 4), name="mine")
    plan = RunSchedules.of(given)
    assert (plan.name, plan.placement) == ("mine", given.placement)
    assert plan.schedule(4).without_communication() == given
    assert plan.schedule(4).is_lowered
    with pytest.raises(ScheduleError, match=r"^schedule mine is for 4 microbatches, not for 8$"):
        plan.schedule(8)


def test_a_schedule_that_is_lowered_already_is_taken_as_it_is():
    lowered = RunSchedules.named("1f1b", 2).schedule(4)
    assert RunSchedules.of(lowered).schedule(4) is lowered


def test_post_validation_is_no_part_of_a_plan_but_is_checked():
    plain, costs = generate("zb-2p", 4, 8), StageCosts.uniform(4)
    given = with_post_validation(plain, costs)
    for fixed in (given, lower(given)):
        schedule = RunSchedules.of(fixed).schedule(8)
        assert schedule.without_communication() == plain
        assert schedule.is_lowered
    with pytest.raises(ScheduleError, match="rank 1 runs STEP0 0 times"):
        RunSchedules.of(without(given, 1, Op(OpKind.STEP, 0))).schedule(8)
    only_validate = without(given, 1, Op(OpKind.STEP, 0))
    for rank in (0, 2, 3):
        only_validate = without(only_validate, rank, Op(OpKind.STEP, 0))
    with pytest.raises(ScheduleError, match="rank 0 runs STEP0 0 times"):
        RunSchedules.of(only_validate).schedule(8)
    twice = replace(given, ops=((Op(OpKind.STEP, 1), *given.ops[0]), *given.ops[1:]))
    with pytest.raises(ScheduleError, match="rank 0 runs STEP1: an iteration has STEP0 and VALIDATE0 only"):
        RunSchedules.of(twice).schedule(8)


def without(schedule: Schedule, rank: int, op: Op) -> Schedule:
    ops = [[o for o in lane if (r, o) != (rank, op)] for r, lane in enumerate(schedule.ops)]
    return replace(schedule, ops=tuple(map(tuple, ops)))


def swapped(schedule: Schedule, rank: int, first: Op, second: Op) -> Schedule:
    lane = [{first: second, second: first}.get(op, op) for op in schedule.ops[rank]]
    return replace(schedule, ops=(*schedule.ops[:rank], tuple(lane), *schedule.ops[rank + 1 :]))


@pytest.mark.parametrize(("kind", "rank"), [(OpKind.F, 0), (OpKind.B, 1), (OpKind.W, 0)])
def test_a_missing_operation_is_named(kind, rank):
    with pytest.raises(ScheduleError, match=rf"^[^\n]*{kind}2[^\n]*$"):
        RunSchedules.of(without(generate("zb-h1", 2, 4), rank, Op(kind, 2))).schedule(4)


@pytest.mark.parametrize("lowered", [False, True])
def test_operations_in_an_impossible_order_are_named(lowered):
    schedule = RunSchedules.named("zb-h1", 2).schedule(4) if lowered else generate("zb-h1", 2, 4)
    with pytest.raises(ScheduleError, match=r"^[^\n]*B1[^\n]*$"):
        RunSchedules.of(swapped(schedule, 1, Op(OpKind.F, 1), Op(OpKind.B, 1))).schedule(4)


@pytest.mark.parametrize("shards", [False, True])
def test_an_evaluation_may_have_any_number_of_microbatches(shards):
    plan = RunSchedules.named("interleaved-1f1b", 4).requesting(vocabulary_parallel=shards)
    with pytest.raises(ScheduleError):
        plan.schedule(6)
    forwards = prepare(plan.for_evaluation(6), forward_only=True)
    assert forwards.placement == plan.placement
    assert forwards.is_vocabulary_parallel is shards
    assert sum(op.kind is OpKind.F for ops in forwards.ops for op in ops) == 6 * plan.placement.num_stages


def test_a_schedule_is_made_once():
    plan = RunSchedules.named("zb-h1", 2)
    assert plan.schedule(4) is plan.schedule(4)
    assert plan.requesting(costs=StageCosts.uniform(2), memory_limit=None).schedule(4) is not plan.schedule(4)
