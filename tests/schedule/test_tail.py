"""The W's at the end of a rank, reordered by parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import (
    InvalidSchedule,
    Op,
    Placement,
    Schedule,
    StageCosts,
    lower,
    simulate,
    validate,
    with_post_validation,
)
from megatron.zero_bubble.schedule.formats import schedule_from_json, schedule_to_json
from megatron.zero_bubble.schedule.tail import reorder_tail, run_together
from tests.schedule.random_schedules import schedules


def words(schedule: Schedule, rank: int) -> str:
    return " ".join(map(str, schedule.ops[rank]))


def lane(*ops: str) -> tuple[Op, ...]:
    return tuple(map(Op.parse, ops))


def test_what_is_left_after_the_last_backward_is_the_tail():
    schedule = reorder_tail(generate("zb-h2", 2, 3))
    assert words(schedule, 0) == "F0 F1 F2 B0 W0 B1 W1 B2 W2"
    assert words(schedule, 1) == "F0 B0 F1 B1 F2 B2 W0 W1 W2"


def test_the_last_chunk_comes_first_each_in_microbatch_order():
    ops = lane("F0", "F1", "F0.1", "F1.1", "B0.1", "B1.1", "B0", "W0.1", "B1", "W0", "W1.1", "W1")
    schedule = Schedule("v", Placement("v", 1, 2), 2, (ops,))
    validate(schedule)
    assert words(reorder_tail(schedule), 0).endswith("W0.1 B1 W1.1 W0 W1")


def test_the_optimizers_step_stays_behind_the_tail():
    schedule, costs = generate("zb-h2", 2, 3), StageCosts.uniform(2)
    reordered = reorder_tail(with_post_validation(schedule, costs))
    validate(reordered)
    assert words(reordered, 1).endswith("B2 W0 W1 W2 STEP0")
    assert reordered == with_post_validation(reorder_tail(schedule), costs)


def test_a_fused_backward_leaves_no_tail():
    assert reorder_tail(generate("1f1b", 4, 8)) == generate("1f1b", 4, 8)


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_nothing_but_the_order_of_the_last_gradients_changes(schedule):
    """The schedule stays valid, as long and as large; lowering commutes with it, and a second time changes nothing."""
    reordered = reorder_tail(schedule)
    validate(reordered)
    validate(lower(reordered))
    assert lower(reordered) == reorder_tail(lower(schedule))
    assert reorder_tail(reordered) == reordered
    costs = StageCosts.uniform(schedule.num_stages, 3, 5, 2, time_comm=1, memory_f=4, memory_b=-1, memory_w=-3)
    before, after = simulate(schedule, costs), simulate(reordered, costs)
    assert (after.spans, after.makespan, after.peak_memory) == (before.spans, before.makespan, before.peak_memory)
    assert schedule_from_json(schedule_to_json(reordered)) == reordered


def test_neighbours_of_one_chunk_run_together():
    groups = run_together(lane("W0", "W1", "B2", "W2.1", "W3.1", "W2", "W3", "STEP0"))
    assert [" ".join(map(str, group)) for group in groups] == ["W0", "W1", "B2", "W2.1 W3.1", "W2 W3", "STEP0"]


def test_gradients_of_a_vocabulary_shard_surround_the_others():
    """T's and EW's stay in microbatch order; what is exchanged between them stays in its place."""
    ops = lane("B1", "W0", "T0", "W1", "EW0", "T1", "EW1", "STEP0")
    lowered = lane("B1", "W0", "T0", "EMBEDDED_GRAD0", "W1", "EW0", "T1", "EMBEDDED_GRAD1", "EW1")
    placement = Placement("linear", 1)
    reordered, reordered_lowered = (reorder_tail(Schedule("tail", placement, 2, (each,))) for each in (ops, lowered))
    assert words(reordered, 0) == "B1 T0 T1 W0 W1 EW0 EW1 STEP0"
    assert words(reordered_lowered, 0) == "B1 T0 T1 EMBEDDED_GRAD0 W0 W1 EW0 EMBEDDED_GRAD1 EW1"
    groups = run_together(reordered.ops[0])
    assert [" ".join(map(str, group)) for group in groups] == ["B1", "T0", "T1", "W0 W1", "EW0", "EW1", "STEP0"]


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "v-half", "interleaved-zb"])
def test_a_tail_with_vocabulary_shards_is_valid_and_as_long_and_large(name):
    schedule = generate(name, 3, 6, vocabulary_parallel=True)
    shard = {"time_e": 0.1, "time_ew": 0.1, "time_s": 0.6, "time_t": 0.3, "memory_s": 0.2, "memory_t": -0.2}
    costs = StageCosts.uniform(schedule.num_stages, time_comm=0.05).with_shards(schedule.placement, shard)
    for before in (schedule, lower(schedule, costs=costs), with_post_validation(schedule, costs)):
        reordered = reorder_tail(before)
        assert reordered != before
        validate(reordered)
        assert reorder_tail(reordered) == reordered
        old, new = simulate(before, costs), simulate(reordered, costs)
        assert new.makespan <= old.makespan * (1 + 1e-9)
        assert new.peak_memory == pytest.approx(old.peak_memory)


def test_a_gradient_is_computed_once():
    schedule = reorder_tail(generate("zb-h2", 2, 3))
    twice = (*schedule.ops[0], *lane("BW2"))
    with pytest.raises(InvalidSchedule, match="rank 0 runs BW2 and also B2"):
        validate(replace(schedule, ops=(twice, schedule.ops[1])))
    early = (*schedule.ops[1][:-4], *lane("W0", "W1", "W2", "B2"))
    with pytest.raises(InvalidSchedule, match="rank 1 runs W2 before B2, which it needs"):
        validate(replace(schedule, ops=(schedule.ops[0], early)))
