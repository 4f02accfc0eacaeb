"""Costs of a plan, corrected by the steps that ran it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.runtime.plan_check import differences, with_measured_span, with_measured_times
from megatron.zero_bubble.schedule import StageCosts, simulate

PLANNED = StageCosts.uniform(4, 3, 2, 1, 0.1, 100, -50, -50)


def words(planned: StageCosts, corrected: StageCosts) -> list[str]:
    return [str(one) for one in differences(planned, corrected)]


def test_times_are_the_measured_ones_and_memory_and_messages_stay():
    measured = StageCosts.uniform(4, 4, 2, 1, 9, 777, -7, -7)
    assert with_measured_times(PLANNED, measured, generate("zb-h1", 4, 8)) == replace(PLANNED, time_f=(4,) * 4)


@pytest.mark.parametrize(("measured_r", "expected"), [(0, 4), (5, 5)])
def test_recomputation_that_did_not_run_has_changed_as_forwards_have(measured_r, expected):
    planned = StageCosts.uniform(2, 3, time_r=3, memory_r=0.5)
    measured = StageCosts.uniform(2, 4, time_r=measured_r, memory_r=0.5)
    assert with_measured_times(planned, measured, generate("zb-h1", 2, 4)).time_r == (expected, expected)


def test_a_fused_backward_keeps_the_planned_shares_of_b_and_w():
    """In 1F1B no B and no W runs alone, so that the measured costs have half of BW as B and half as W."""
    planned = StageCosts.uniform(2, 3, 6, 3, saved_bw=1)
    measured = StageCosts.uniform(2, 3, 8, 8)
    corrected = with_measured_times(planned, measured, generate("1f1b", 2, 4))
    assert (corrected.time_b, corrected.time_w, corrected.saved_bw) == ((12, 12), (6, 6), (2, 2))
    apart = with_measured_times(planned, measured, generate("zb-h1", 2, 4))
    assert (apart.time_b, apart.time_w) == ((8, 8), (8, 8))
    assert apart.saved_bw == pytest.approx((16 / 9,) * 2), "no BW ran: the saving grows with B and W"


def test_shards_that_did_not_run_keep_their_time():
    planned = replace(PLANNED, time_s=(2, 2, 2, 2), time_t=(1, 1, 1, 1))
    measured = replace(PLANNED, time_s=(3, 3, 3, 3))
    corrected = with_measured_times(planned, measured, generate("zb-h1", 4, 8))
    assert (corrected.time_s, corrected.time_t) == ((3, 3, 3, 3), (1, 1, 1, 1))


@pytest.mark.parametrize(
    ("name", "num_chunks", "longer"), [("1f1b", None, 1.2), ("zb-h1", None, 1.06), ("zb-v", 2, 1.5), ("zb-2p", None, 2)]
)
def test_messages_explain_the_time_that_operations_do_not(name, num_chunks, longer):
    schedule = generate(name, 2 if num_chunks else 4, 8, num_chunks=num_chunks)
    span = simulate(schedule, PLANNED).cost * longer
    corrected = with_measured_span(PLANNED, schedule, span)
    assert simulate(schedule, corrected).cost == pytest.approx(span, rel=0.01)
    assert replace(corrected, time_comm=PLANNED.time_comm) == PLANNED
    within_a_rank = [1] if num_chunks else []
    assert [edge for edge in range(3) if corrected.time_comm[edge] == 0.1] == within_a_rank


def test_collectives_of_vocabulary_shards_are_as_much_slower_as_messages():
    schedule = generate("zb-h1", 2, 6, vocabulary_parallel=True)
    shard = {"time_s": 1, "time_t": 0.5, "latency_collective": 0.4}
    costs = StageCosts.uniform(2, 3, 2, 1, 0.1, 100, -50, -50).with_shards(schedule.placement, shard)
    span = 1.2 * simulate(schedule, costs).cost
    corrected = with_measured_span(costs, schedule, span)
    assert simulate(schedule, corrected).cost == pytest.approx(span, rel=0.01)
    added = corrected.time_comm[0] - 0.1
    assert added > 0
    assert corrected.latency_collective == pytest.approx((0.4 + added,) * 2)


def test_steps_that_are_faster_than_planned_need_no_slower_messages():
    schedule = generate("1f1b", 4, 8)
    assert with_measured_span(PLANNED, schedule, simulate(schedule, PLANNED).cost) is PLANNED


def test_one_rank_sends_no_messages():
    costs = StageCosts.uniform(1)
    assert with_measured_span(costs, generate("1f1b", 1, 8), 1000.0) is costs


def test_the_stage_that_differs_most_is_said_for_each_kind():
    assert words(PLANNED, replace(PLANNED, time_f=(3.1, 3.1, 3.1, 3.1), time_b=(2.09,) * 4)) == []
    assert words(PLANNED, replace(PLANNED, time_f=(2.8, 3, 4, 5), time_w=(1, 0.5, 1, 1))) == [
        "F of stage 3 takes 5.00 ms, 3.00 were planned",
        "W of stage 1 takes 0.50 ms, 1.00 were planned",
    ]


def test_operations_that_take_hardly_any_time_are_not_mentioned():
    planned = replace(PLANNED, time_e=(0.01,) * 4)
    assert words(planned, replace(planned, time_e=(0.05,) * 4)) == []


def test_messages_are_said_if_a_microbatch_waits_for_them():
    assert words(PLANNED, replace(PLANNED, time_comm=(0.15, 0.15, 0.15))) == []
    assert words(PLANNED, replace(PLANNED, time_comm=(0.4, 0.4, 0.4))) == [
        "ranks wait as if a message took 0.40 ms, 0.10 were planned"
    ]
