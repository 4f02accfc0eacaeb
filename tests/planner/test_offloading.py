"""Under a memory limit, plans copy activations to the host where that is faster: the rates decide."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.fused_backwards import with_separate_backwards
from megatron.zero_bubble.planner.offloading import RULES, CopyRule, with_copies
from megatron.zero_bubble.planner.problem import Problem
from megatron.zero_bubble.planner.registry import placement_for
from megatron.zero_bubble.planner.request import QUICK_EFFORT
from megatron.zero_bubble.schedule import Infeasible, ScheduleError, StageCosts, lower, simulate, validate
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.host_link import num_offloaded, without_copies
from megatron.zero_bubble.schedule.recomputation import Recompute, num_recomputed

NUM_RANKS, NUM_MICROBATCHES = 4, 12


def costs_of(name: str, copy: float, recompute: Recompute = Recompute.NONE) -> StageCosts:
    """Costs of equal stages; a copy of all that a microbatch holds on a rank takes `copy` of its F."""
    costs = default_costs(placement_for(name, NUM_RANKS), recompute)
    times = tuple(copy * time for time in costs.time_f)
    return replace(costs, time_d=times, time_h=times, memory_d=tuple(15 / 16 * held for held in costs.memory_f))


@cache
def planned(name: str, limit: float, copy: float, **options):
    costs = costs_of(name, copy, options.get("recompute", Recompute.NONE))
    options = {"costs": costs, "memory_limit": limit, "effort": 30_000, **options}
    schedule = generate(name, NUM_RANKS, NUM_MICROBATCHES, **options)
    validate(lower(schedule))
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    return timeline


@pytest.mark.parametrize(("name", "limit"), [("auto", 2), ("zb-v", 2), ("zb-v", 1.5), ("v-half", 1.5)])
def test_a_fast_link_makes_plans_under_a_limit_faster(name, limit):
    kept, copied = planned(name, limit, 0.5), planned(name, limit, 0.5, offloads=True)
    assert num_offloaded(copied.schedule) > 0
    assert copied.makespan < kept.makespan


def test_half_of_the_memory_of_a_v_costs_little_where_the_link_is_fast():
    whole = planned("zb-v", NUM_RANKS, 0.5)
    half = planned("zb-v", NUM_RANKS / 2, 0.5, offloads=True)
    kept = planned("zb-v", NUM_RANKS / 2, 0.5)
    assert half.makespan - whole.makespan <= 0.5 * (kept.makespan - whole.makespan)


def test_a_v_runs_in_half_of_its_memory_where_copies_back_and_forth_take_as_long_as_the_computation():
    """A copy of all activations, to the host and back, takes as long as F, B and W."""
    costs = default_costs(placement_for("zb-v", 8))
    stages = costs.num_stages
    costs = replace(costs, time_d=(1.5,) * stages, time_h=(1.5,) * stages, memory_d=(15 / 32,) * stages)
    options = {"costs": costs, "effort": QUICK_EFFORT}
    half = simulate(generate("zb-v", 8, 32, memory_limit=4, offloads=True, takes_makespan=True, **options), costs)
    whole = simulate(generate("zb-v", 8, 32, **options), costs)
    assert half.makespan <= 1.01 * whole.makespan


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 8), (8, 16)])
def test_w_runs_while_a_rank_waits_for_copies(num_ranks, num_microbatches):
    """In the memory of V-Min, with a link as fast as F, a V takes the time that it takes without a limit."""
    costs = replace(default_costs(placement_for("zb-v", num_ranks)), memory_d=(0.45,) * 2 * num_ranks)
    costs = replace(costs, time_d=(0.45,) * 2 * num_ranks, time_h=(0.45,) * 2 * num_ranks)
    smallest = max(simulate(generate("v-min", num_ranks, num_microbatches, effort=QUICK_EFFORT), costs).peak_memory)
    options = {"costs": costs, "memory_limit": smallest, "offloads": True, "effort": QUICK_EFFORT}
    copied = simulate(generate("zb-v", num_ranks, num_microbatches, **options), costs)
    work = num_microbatches * 2 * (costs.time_f[0] + costs.time_b[0] + costs.time_w[0])
    assert copied.makespan <= 1.02 * (work + (num_ranks - 1) * costs.time_f[0])


def test_a_poor_plan_under_one_limit_does_not_end_the_search_of_larger_ones():
    costs = replace(default_costs(placement_for("zb-v", 8)), time_d=(0.375,) * 16, time_h=(0.375,) * 16)
    costs = replace(costs, memory_d=tuple(15 / 16 * held for held in costs.memory_f))
    options = {"costs": costs, "memory_limit": 2, "effort": 30_000}
    kept, copied = (generate("zb-v", 8, 64, **options, offloads=offloads) for offloads in (False, True))
    assert simulate(copied, costs).cost < 0.6 * simulate(kept, costs).cost


def test_a_slow_link_copies_nothing():
    copied = planned("auto", 2, 100, offloads=True)
    assert num_offloaded(copied.schedule) == 0
    assert copied.schedule == planned("auto", 2, 100).schedule


def test_nothing_is_copied_where_there_is_room_or_nothing_to_copy():
    assert num_offloaded(planned("auto", 2 * NUM_RANKS, 0.1, offloads=True).schedule) == 0
    costs = default_costs(placement_for("auto", NUM_RANKS))
    schedule = generate("auto", NUM_RANKS, NUM_MICROBATCHES, costs=costs, memory_limit=2, offloads=True)
    assert num_offloaded(schedule) == 0
    unlimited = generate("auto", NUM_RANKS, NUM_MICROBATCHES, costs=costs_of("auto", 0.1), offloads=True)
    assert num_offloaded(unlimited) == 0


def test_the_planner_chooses_between_copies_and_recomputation_by_their_times():
    recompute = {"recompute": Recompute.PLANNED, "takes_makespan": True}
    slow = planned("auto", 2, 100, offloads=True, **recompute)
    fast = planned("auto", 2, 0.25, offloads=True, **recompute)
    assert num_recomputed(slow.schedule) > 0
    assert num_offloaded(slow.schedule) == 0
    assert num_offloaded(fast.schedule) > 0
    assert fast.makespan < slow.makespan


def test_stages_that_restore_in_groups_copy_where_that_is_faster():
    costs = StageCosts.uniform(2, 10, 10, 10, 15, 1.0, -0.5, -0.5, time_r=20.0, memory_r=0.9)
    costs = replace(costs, num_blocks=(2, 2), time_d=(2.5, 2.5), time_h=(2.5, 2.5), memory_d=(0.95, 0.95))
    options = {"costs": costs, "memory_limit": 0.8, "recompute": Recompute.PLANNED}
    restored, copied = (generate("auto", 2, 8, **options, offloads=offloads) for offloads in (False, True))
    assert copied.groups == (2, 2)
    assert num_offloaded(copied) > 0
    validate(lower(copied))
    timeline = simulate(copied, costs)
    assert max(timeline.peak_memory) <= 0.8 * (1 + 1e-9)
    assert timeline.cost < 0.9 * simulate(restored, costs).cost


def test_a_plan_that_may_recompute_and_copy_is_not_slower_than_one_that_may_do_either():
    ways = ({"recompute": Recompute.PLANNED}, {"offloads": True})
    options = {"takes_makespan": True}
    both = planned("auto", 2, 0.75, **ways[0], **ways[1], **options).makespan
    assert both <= min(planned("auto", 2, 0.75, **way, **options).makespan for way in ways)


def test_with_copies_a_v_fits_where_it_does_not_without():
    placement = placement_for("zb-v", NUM_RANKS)
    costs = costs_of("zb-v", 0.5)
    problem = Problem(placement, NUM_MICROBATCHES, costs, (0.9,) * NUM_RANKS)
    with pytest.raises(Infeasible):
        problem.check_feasible()
    with pytest.raises(Infeasible):
        planned("zb-v", 0.9, 0.5)
    assert num_offloaded(planned("zb-v", 0.9, 0.5, offloads=True).schedule) > 0


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ScheduleError, match=r"schedule 1f1b does not plan offload: choose one of zb-1p, .*v-min"):
        planned("1f1b", 4, 0.5, offloads=True)
    with pytest.raises(ScheduleError, match="pairs of a forward and a backward do not work with offload"):
        planned("auto", 4, 0.5, offloads=True, pairs=True)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-zb", "gpipe"]),
    share=st.floats(0.3, 1.0),
    copy=st.floats(0.05, 3.0),
    rule=st.builds(CopyRule._replace, st.sampled_from(RULES), assumed=st.sampled_from((1.0, 0.7))),
)
def test_any_schedule_keeps_its_operations_and_its_limit(name, share, copy, rule):
    plain, costs = generate(name, NUM_RANKS, NUM_MICROBATCHES), costs_of(name, copy)
    limits = tuple(max(1.5, share * peak) for peak in simulate(plain, costs).peak_memory)
    found = with_copies(simulate(plain, costs), Problem(plain.placement, NUM_MICROBATCHES, costs, limits), rule)
    if found is None:
        return
    validate(lower(found))
    peaks = simulate(found, costs).peak_memory
    assert all(peak <= limit * (1 + 1e-6) for peak, limit in zip(peaks, limits, strict=True))
    for kept, before in zip(without_copies(found).ops, plain.ops, strict=True):
        assert sorted(kept) == sorted(before)


def test_activations_are_back_before_a_backward_that_takes_no_time():
    """Each B starts at the same time as the W after it."""
    copies = {"time_d": 1e-40, "time_h": 1e-40, "memory_d": 1}
    costs = StageCosts.uniform(1, time_b=1e-40, memory_b=0, memory_w=-1, **copies)
    problem = Problem(placement_for("gpipe", 1), 4, costs, (2,))
    separate = with_separate_backwards(generate("gpipe", 1, 4))
    schedule = with_copies(simulate(separate, costs), problem, RULES[0])
    assert schedule is not None
    assert num_offloaded(schedule) > 0
    validate(schedule)
    simulate(schedule, costs)
