from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate, placement_for
from megatron.zero_bubble.planner.bounds import lower_bound
from megatron.zero_bubble.schedule import Placement, ScheduleError, StageCosts, simulate
from tests.planner.planning import ROWS, random_costs, row_costs, row_id
from tests.schedule.random_schedules import placements, schedules
from tests.schedule.test_lower import made_of


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_equal_stages_have_the_published_bounds(row):
    p, m, times = row["num_stages"], row["num_microbatches"], row["time_ms"]
    f, b, w, c = (times[key] for key in ("F", "B", "W", "comm"))
    work = m * (f + b + w)
    unlimited = lower_bound(Placement("linear", p), m, row_costs(row))
    assert unlimited == pytest.approx(max(work, (m + p - 1) * (f + b) + 2 * (p - 1) * c + w))
    # In p M_B nothing is better than ZB-H1: F are missing before the first B, and B and W after the last F.
    limited = lower_bound(Placement("linear", p), m, row_costs(row), p)
    assert limited == pytest.approx(work + (p - 1) * (f + b - w + 4 * c))


@settings(max_examples=300, deadline=None)
@given(schedules(), st.data())
def test_no_schedule_is_below_the_bound_in_its_own_memory(schedule, data):
    costs = data.draw(random_costs(schedule.num_stages))
    timeline = simulate(schedule, costs, overlap_communication=data.draw(st.booleans()))
    bound = lower_bound(schedule.placement, schedule.num_microbatches, costs, timeline.peak_memory)
    assert max(timeline.work) <= bound * (1 + 1e-9)
    assert bound <= timeline.cost * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 12), st.sampled_from(["zb-h1", "zb-h2", "zb-1p", "zb-2p", "auto"]))
def test_good_schedules_are_not_below_the_bound(data, p, m, name):
    costs = data.draw(random_costs(p))
    timeline = simulate(generate(name, p, m, costs=costs), costs)
    assert lower_bound(Placement("linear", p), m, costs, timeline.peak_memory) <= timeline.cost * (1 + 1e-9)


def test_operations_on_vocabulary_shards_run_where_others_wait():
    """T0 of rank 0 runs before its B0: its work and the idle time between F and B do not add up."""
    schedule = made_of("linear", 2, 1, 1, "E0 F0 S0 T0 B0 W0 EW0", "E0 F0 S0 L0 B0 W0 T0 EW0")
    costs = StageCosts.uniform(2).with_shards(schedule.placement, {"time_s": 0.5, "time_t": 1})
    timeline = simulate(schedule, costs)
    assert timeline.spans[0] == 5.5
    for limits in (None, timeline.peak_memory):
        assert lower_bound(schedule.placement, 1, costs, limits) == 5


def test_no_schedule_with_vocabulary_shards_is_below_the_bound():
    for name in ("zb-h2", "v-half"):
        placement = placement_for(name, 3)
        shard = {"time_e": 0.1, "time_ew": 0.1, "time_s": 0.5, "time_t": 0.25, "memory_s": 0.1, "memory_t": -0.1}
        costs = StageCosts.uniform(placement.num_stages, time_comm=0.1).with_shards(placement, shard)
        timeline = simulate(generate(name, 3, 6, costs=costs, vocabulary_parallel=True), costs)
        for limits in (None, timeline.peak_memory):
            bound = lower_bound(placement, 6, costs, limits)
            assert 0.5 * timeline.cost < bound <= timeline.cost * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data(), placements, st.integers(1, 12), st.floats(0.5, 40))
def test_more_memory_never_raises_the_bound(data, placement, m, limit):
    costs = data.draw(random_costs(placement.num_stages))
    low, high = (lower_bound(placement, m, costs, x) for x in (limit, limit * 1.2))
    assert lower_bound(placement, m, costs) <= high * (1 + 1e-9) <= low * (1 + 1e-8)


def test_negative_memory_turns_the_memory_bound_off():
    odd = StageCosts.uniform(4, memory_f=1, memory_b=-2, memory_w=1)
    assert lower_bound(Placement("linear", 4), 8, odd, 1) == lower_bound(Placement("linear", 4), 8, odd)


def test_costs_limits_and_microbatches_that_do_not_fit_are_refused():
    costs = StageCosts.uniform(4)
    for arguments, message in [
        ((Placement("linear", 3), 4, costs), "the placement has 3 stages, but the costs are for 4"),
        ((Placement("linear", 4), 4, costs, [1, 2]), "memory_limit has 2 entries, but there are 4 ranks"),
        ((Placement("linear", 4), 0, costs), "at least one microbatch, got 0"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            lower_bound(*arguments)
