"""ZB-V, V-Half and V-Min: within their memory, at the real costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.bounds import lower_bound
from megatron.zero_bubble.planner.generate import schedule_of
from megatron.zero_bubble.planner.request import QUICK_EFFORT, PlanRequest
from megatron.zero_bubble.schedule import (
    Infeasible,
    Op,
    OpKind,
    Placement,
    Schedule,
    StageCosts,
    lower,
    simulate,
    validate,
)
from tests.planner.planning import LITTLE, ROWS, random_costs, row_costs, row_id

LIMITS = {"zb-v": lambda p: p, "v-half": lambda p: p / 2 + 1, "v-min": lambda p: p / 3 + 1}


def halves(costs: StageCosts) -> StageCosts:
    """The same work in two equal chunks a rank."""
    stages = 2 * costs.num_stages
    return StageCosts.uniform(
        stages, costs.time_f[0] / 2, costs.time_b[0] / 2, costs.time_w[0] / 2, costs.time_comm[0], 0.5, -0.25, -0.25
    )


@pytest.mark.parametrize("row", ROWS[::3], ids=row_id)
def test_zb_v_beats_zb_1p_by_a_wide_margin_in_the_same_memory(row):
    p, m = row["num_stages"], row["num_microbatches"]
    costs = halves(row_costs(row))
    timeline = simulate(generate("zb-v", p, m, costs=costs, effort=QUICK_EFFORT), costs)
    assert timeline.bubble_rate < 0.5 * row["bubble_rate"]["zb-1p"]
    assert max(timeline.peak_memory) <= p


@pytest.mark.parametrize("row", [row for row in ROWS if row["num_stages"] < 32], ids=row_id)
def test_no_schedule_of_a_v_in_the_same_memory_has_less_bubble_at_published_times(row):
    check_reaches_bound(row["num_stages"], row["num_microbatches"], halves(row_costs(row)))


@pytest.mark.parametrize("m", [72, 96, 192])
def test_nor_has_any_on_24_ranks(m):
    """The layers of the paper's 14.6B model on 24 ranks instead of 16."""
    check_reaches_bound(24, m, StageCosts.uniform(48, 3.77, 3.75, 2.7, 0.38, 0.5, -0.25, -0.25))


def check_reaches_bound(p: int, m: int, costs: StageCosts) -> None:
    timeline = simulate(generate("zb-v", p, m, costs=costs), costs)
    assert max(timeline.peak_memory) <= p
    assert timeline.cost == pytest.approx(lower_bound(Placement("v", p, 2), m, costs, p))


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_no_bubble_where_f_b_and_w_are_equal(p):
    costs = StageCosts.uniform(2 * p, memory_f=0.5, memory_b=-0.25, memory_w=-0.25)
    assert simulate(generate("zb-v", p, 3 * p, costs=costs), costs).bubble_rate == 0


@pytest.mark.parametrize(("name", "share"), [("v-half", 0.62), ("v-min", 0.78)])
@pytest.mark.parametrize("p", [8, 16])
def test_equal_costs_give_about_half_and_two_thirds_of_the_bubble_of_1f1b(name, share, p):
    costs = StageCosts.uniform(2 * p, memory_f=0.5, memory_b=-0.25, memory_w=-0.25)
    timeline = simulate(generate(name, p, 4 * p, costs=costs, effort=QUICK_EFFORT), costs)
    bubble = timeline.cost - max(timeline.work)
    assert bubble <= share * (p - 1) * 6


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_full_recomputation_has_room_for_what_b_computes_again(name, p):
    """Little is kept from F to B, much from B to W: then W follows its B at once, and it is still worth it."""
    costs = StageCosts.uniform(2 * p, 5, 10, 4, memory_f=1, memory_b=15, memory_w=-16)
    schedule = generate(name, p, 2 * p, costs=costs)
    validate(lower(schedule))
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_memory) <= LIMITS[name](p) * 2 + 2 * 15
    whole = StageCosts.uniform(p, 10, 20, 8)
    assert timeline.cost < 0.9 * simulate(generate("1f1b", p, 2 * p), whole).cost


@given(name=st.sampled_from(sorted(LIMITS)), p=st.integers(1, 5), m=st.integers(1, 12), data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_costs_give_a_valid_schedule_within_the_limit(name, p, m, data):
    costs = data.draw(random_costs(2 * p))
    limits = tuple(LIMITS[name](p) * sum(costs.memory_f[s] for s in (r, 2 * p - 1 - r)) + 1e-6 for r in range(p))
    try:
        schedule = generate(name, p, m, costs=costs, memory_limit=limits, effort=LITTLE)
    except Infeasible as error:
        generate(name, p, m, costs=costs, memory_limit=error.smallest_limit * (1 + 1e-6), effort=LITTLE)
        return
    validate(lower(schedule))
    for peak, limit in zip(simulate(schedule, costs).peak_memory, limits, strict=True):
        assert peak <= limit * (1 + 1e-6)


def test_too_small_a_limit_names_the_smallest_that_works():
    with pytest.raises(Infeasible) as error:
        generate("v-min", 4, 8, memory_limit=0.5)
    smallest = error.value.smallest_limit
    schedule = generate("v-min", 4, 8, memory_limit=smallest)
    validate(lower(schedule))


def test_uneven_stages_near_the_memory_of_v_min_are_close_to_the_bound():
    """Repeated blocks alone, in which all ranks keep one beat, are 14% from it."""
    p, m, limit = 4, 8, 1.1 * (4 / 3 + 1)
    generator = random.Random(1)
    times = [generator.uniform(0.8, 1.25) for _ in range(2 * p)]
    b, w = generator.uniform(0.9, 1.3), generator.uniform(0.6, 1)
    costs = StageCosts(
        times,
        [b * time for time in times],
        [w * time for time in times],
        [0.05] * (2 * p - 1),
        *([amount] * (2 * p) for amount in (0.5, -0.25, -0.25)),
    )
    timeline = simulate(generate("zb-v", p, m, costs=costs, memory_limit=limit), costs)
    assert timeline.cost <= 1.1 * lower_bound(Placement("v", p, 2), m, costs, limit)
    assert max(timeline.peak_memory) <= limit


@pytest.mark.parametrize("p", [4, 8])
def test_a_quick_plan_in_little_memory_overlaps_microbatches(p):
    """The order with one microbatch at a time, which always fits, takes up to 2.8 times as long as the best plan."""
    request = PlanRequest("zb-v", 3 * p, (Placement("v", p, 2),), memory_limit=0.32 * p, takes_makespan=True)
    costs = StageCosts.uniform(2 * p, 1, 1.05, 0.8, memory_f=0.5, memory_b=-0.25, memory_w=-0.25)
    quick, thorough = (
        simulate(schedule_of(replace(request, costs=costs, effort=effort)), costs).makespan
        for effort in (0, QUICK_EFFORT)
    )
    in_turn = 3 * p * (2 * p * (1 + 1.05) + 2 * 0.8)
    assert thorough <= quick < 0.95 * in_turn


OFFSETS = {
    "v-min": lambda p, s, d: (s, 2 * p - 1 - s, 2 * p + d + s, 4 * p + d - s - 1),
    "v-half": lambda p, s, d: (2 * s, 3 * p - s - 2, 3 * p + d + 2 * s - 1, 6 * p + d - s - 2),
}
"""The published starts of F0, F1, B1 and B0 on rank s of p, in slots of a period of six (arXiv 2405.15362)."""


def published_pattern(name: str, p: int, m: int) -> Schedule:
    """The schedule of the paper: its block repeated m times, with each W in the first free slot after its B."""
    delay = {"v-min": 2 if p % 3 == 0 else 0, "v-half": 3 if p % 2 == 0 else 0}[name]
    kinds = ((OpKind.F, 0), (OpKind.F, 1), (OpKind.B, 1), (OpKind.B, 0))
    ranks = []
    for s in range(p):
        starts = OFFSETS[name](p, s, delay)
        taken = {start % 6 for start in starts}
        timed = [(start, kind, chunk) for start, (kind, chunk) in zip(starts, kinds, strict=True)]
        for start, (kind, chunk) in zip(starts[2:], kinds[2:], strict=True):
            assert kind is OpKind.B
            slot = next(t for t in range(start + 1, start + 7) if t % 6 not in taken)
            taken.add(slot % 6)
            timed.append((slot, OpKind.W, chunk))
        ops = sorted((start + 6 * k, k, kind, chunk) for start, kind, chunk in timed for k in range(m))
        ranks.append(tuple(Op(kind, k, chunk) for _, k, kind, chunk in ops))
    return Schedule(name, Placement("v", p, 2), m, tuple(ranks))


@pytest.mark.exhaustive  # the tests below compare with bounds and other schedules at the same costs
@pytest.mark.parametrize("row", ROWS[::3], ids=row_id)
@pytest.mark.parametrize("name", sorted(OFFSETS))
def test_real_costs_beat_the_pattern_for_equal_costs(row, name):
    p, m = row["num_stages"], row["num_microbatches"]
    costs = halves(row_costs(row))
    pattern = published_pattern(name, p, m)
    validate(pattern)
    ours = simulate(generate(name, p, m, costs=costs), costs)
    assert ours.cost <= simulate(pattern, costs).cost
    assert max(ours.peak_memory) <= LIMITS[name](p)
