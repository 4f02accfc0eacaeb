from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from megatron.zero_bubble.schedule import OpKind, Placement, ScheduleError, StageCosts


def test_uniform_costs_repeat_for_every_stage():
    costs = StageCosts.uniform(3, 2, 3, 1, 0.5)
    assert costs.num_stages == 3
    assert costs.time_f == (2, 2, 2)
    assert costs.time_comm == (0.5, 0.5)
    assert costs.work(1) == 6


def test_a_fused_backward_costs_b_and_w():
    costs = StageCosts.uniform(2, time_b=3, time_w=4, memory_b=-3, memory_w=-4)
    assert costs.times[OpKind.BW] == (7, 7)
    assert costs.memory[OpKind.BW] == (-7, -7)


def test_fractions_stay_exact():
    costs = StageCosts.uniform(1, Fraction(1, 3), Fraction(1, 3), Fraction(1, 3))
    assert costs.work(0) == 1


@pytest.mark.parametrize("name", ["time_f", "time_b", "time_w"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_impossible_times_are_refused(name, value):
    with pytest.raises(ScheduleError, match=name):
        StageCosts.uniform(2, **{name: value})


def test_communication_may_be_free_but_not_negative():
    assert StageCosts.uniform(2, time_comm=0).time_comm == (0,)
    with pytest.raises(ScheduleError, match="time_comm"):
        StageCosts.uniform(2, time_comm=-1)


@pytest.mark.parametrize("name", ["time_b", "time_comm", "memory_w"])
def test_lists_of_the_wrong_length_are_refused(name):
    costs = StageCosts.uniform(4)
    with pytest.raises(ScheduleError, match=name):
        replace(costs, **{name: (1,)})
    with pytest.raises(ScheduleError, match="at least one"):
        StageCosts((), (), (), (), (), (), ())


def test_costs_of_ranks_are_split_into_chunks_and_summed_again():
    ranks = StageCosts.uniform(3, 2, 4, 6, memory_f=8, memory_b=-2, memory_w=-6)
    ranks = replace(ranks, time_comm=(1, 3))
    v, interleaved = Placement("v", 3, 2), Placement("interleaved", 3, 2)
    assert ranks.split_ranks(v).time_comm == (1, 3, 3, 3, 1), "the turn of the V is no edge between ranks"
    assert ranks.split_ranks(interleaved).time_comm == (1, 3, 3, 1, 3)
    assert ranks.split_ranks(Placement("linear", 3)) is ranks
    for placement in (v, interleaved):
        stages = ranks.split_ranks(placement)
        assert (stages.time_f, stages.memory_w) == ((1,) * 6, (-3,) * 6)
        assert stages.whole_ranks(placement) == ranks
    uneven = replace(StageCosts.uniform(6), time_f=(1, 2, 3, 4, 5, 6))
    assert uneven.whole_ranks(v).time_f == (7, 7, 7)
    assert uneven.whole_ranks(interleaved).time_f == (5, 7, 9)


def test_a_fused_backward_saves_a_share_of_other_costs_and_less_than_w():
    planned = StageCosts.uniform(2, time_b=6, time_w=2, saved_bw=1)
    assert StageCosts.uniform(2, time_b=12, time_w=4).saving_as(planned).saved_bw == (2, 2)
    assert StageCosts.uniform(2, time_b=12, time_w=0.5).saving_as(planned).saved_bw == (0.25, 0.25)
    assert planned.times[OpKind.BW] == (7, 7)
    assert planned.with_cheapest_weight_gradients.times[OpKind.BW] == (7, 7)
    with pytest.raises(ScheduleError, match="saved_bw must be less than time_w, got 2 and 2"):
        replace(planned, saved_bw=(2, 2))
