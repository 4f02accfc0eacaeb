"""What a schedule is predicted to do at measured costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.prediction import MegatronsTime, Prediction
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import Placement, StageCosts, simulate
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.recomputation import Recompute
from tests.planner.planning import uneven


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_a_prediction_is_what_simulate_finds(name):
    placement = Placement("linear", 4)
    costs = uneven(placement)
    timeline = simulate(generate(name, 4, 8), costs)
    prediction = Prediction(Profile(placement, costs, 0.0, {}), RunSchedules.named(name, 4).schedule(8))
    assert prediction.idle == timeline.idle
    assert prediction.milliseconds == timeline.makespan
    assert prediction.peak_bytes == timeline.peak_memory
    baseline = simulate(generate("1f1b", 4, 8), costs)
    assert prediction.gain.times == pytest.approx(baseline.makespan / timeline.makespan)
    interlocked = replace(prediction, interlocks=True)
    assert interlocked.gain.times == pytest.approx(baseline.makespan / timeline.cost)


def test_the_speed_up_compares_with_1f1b_at_the_costs_of_the_baseline():
    """Waits of the order that runs, counted as slow messages, would make 1F1B wait in every microbatch."""
    placement = Placement("linear", 4)
    costs = StageCosts.uniform(4)
    waiting = StageCosts.uniform(4, time_comm=1.5)
    prediction = Prediction(Profile(placement, waiting, 0.0, {}), generate("zb-2p", 4, 8), baseline_costs=costs)
    assert prediction.gain.times == pytest.approx(11 * 3 / simulate(prediction.schedule, waiting).makespan)
    assert replace(prediction, baseline_costs=None).gain.times > 1.2 * prediction.gain.times


def test_the_speed_up_compares_with_1f1b_of_the_same_layers_a_rank():
    """Interleaved 1F1B's bubble is (p-1)(F+B+W)/v of a rank's work: with p = 2, v = 2, m = 4, 9/8 against 10/8."""
    placement = Placement("interleaved", 2, 2)
    profile = Profile(placement, StageCosts.uniform(4), 0.0, {})
    prediction = Prediction(profile, RunSchedules.named("interleaved-1f1b", 2).schedule(4))
    assert prediction.gain.times == pytest.approx((4 + 1) / (4 + 0.5))


def test_the_speed_up_of_full_recomputation_compares_with_1f1b_that_recomputes_in_its_backward():
    """megatron-core's 1F1B takes (m+p-1)(F+R+B+W); that of a run which need not recompute keeps everything."""
    profile = Profile(Placement("linear", 4), StageCosts.uniform(4, time_r=1, memory_r=0.9), 0.0, {})
    schedule = generate("zb-h1", 4, 8, recompute=Recompute.FULL)
    makespan = simulate(schedule, profile.costs).makespan
    assert Prediction(profile, schedule, Recompute.FULL).gain.times == pytest.approx(11 * 4 / makespan)
    assert Prediction(profile, schedule, Recompute.PLANNED).gain.times == pytest.approx(11 * 3 / makespan)


def test_the_speed_up_with_a_spread_vocabulary_compares_with_1f1b_of_the_same_work_a_rank():
    """1F1B takes (m+p-1) times the work of a rank, 3.5 here, of which 0.5 is on its vocabulary shard."""
    placement = Placement("linear", 4)
    costs = StageCosts.uniform(4).with_shards(placement, {"time_s": 0.3, "time_t": 0.2})
    schedule = generate("zb-h1", 4, 8, vocabulary_parallel=True)
    makespan = simulate(schedule, costs).makespan
    assert Prediction(Profile(placement, costs, 0.0, {}), schedule).gain.times == pytest.approx(11 * 3.5 / makespan)


def test_megatrons_split_is_slower_by_the_work_of_the_layers_alone():
    """Operations on vocabulary shards take as long as their waits for other ranks, which that split does not have."""
    placement = Placement("linear", 2)
    costs = StageCosts.uniform(2, 2, 2, 2).with_shards(placement, {"time_s": 50.0, "time_t": 0.2})
    assert MegatronsTime(30.0, work=6.0).with_costs(costs) == 60.0
