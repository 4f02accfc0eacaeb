"""R in the planners: valid, within the limit, never worse than what needs no planning, and nothing without need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import checked, random_costs

from megatron.zero_bubble.schedule import Infeasible, Placement, StageCosts, generate, simulate
from megatron.zero_bubble.schedule.bounds import lower_bounds
from megatron.zero_bubble.schedule.generators.auto import multiple_of_p
from megatron.zero_bubble.schedule.memory_limit import MemoryLimit, one_f_one_b_peak
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation

FULL = Recompute.FULL
EQUAL = StageCosts.uniform(8, time_r=1, memory_r=15 / 16)
"""F = R = B = W, and all is dropped but the input of a layer."""


@st.composite
def costs_with_r(draw: st.DrawFn, num_stages: int) -> StageCosts:
    """Random costs, with recomputation of any part of what F keeps."""
    costs = draw(random_costs(num_stages))
    times = draw(st.lists(st.integers(0, 6), min_size=num_stages, max_size=num_stages))
    return replace(costs, time_r=tuple(times), memory_r=tuple(draw(st.integers(0, whole)) for whole in costs.memory_f))


def fits(timeline, limits):
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak_memory, limits, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 9))
def test_the_peak_of_1f1b_is_that_of_1f1b_with_the_same_recomputation(data, p, m):
    costs = data.draw(costs_with_r(p))
    peaks = simulate(generate("1f1b", p, m, recompute=FULL), costs).peak_memory
    assert one_f_one_b_peak(Placement("linear", p), costs, m, recompute=FULL) == max(peaks)
    assert all(peak <= limit for peak, limit in zip(peaks, multiple_of_p(costs, p, 1, FULL), strict=True))
    assert multiple_of_p(costs, p, 2, FULL) == tuple(2 * limit for limit in multiple_of_p(costs, p, 1, FULL))


def test_a_multiple_before_anything_is_measured():
    """Four ranks hold 4 inputs of a sixteenth and one microbatch that is restored."""
    assert MemoryLimit(multiple=2).in_unit_costs(4, 8, FULL) == 2 * (4 / 16 + 15 / 16)
    assert MemoryLimit(multiple=2).in_unit_costs(4, 8, Recompute.PLANNED) == 8


@pytest.mark.parametrize(
    ("name", "inside", "apart"),
    [("1f1b", 92, 83), ("zb-h1", 78, 70), ("zb-h2", 71, 64), ("zb-1p", 92, 76), ("zb-2p", 92, 73)],
)
def test_r_of_its_own_gives_back_the_bubble_that_it_takes_inside_b(name, inside, apart):
    """16 microbatches. ZB-1p and ZB-2p are in the memory of 1F1B, which ZB-H1 and ZB-H2 exceed by their waiting W's."""
    in_backward = EQUAL.recomputing_in_backward()
    assert simulate(generate(name, 8, 16, costs=in_backward), in_backward).cost == inside
    assert checked(generate(name, 8, 16, costs=EQUAL, recompute=FULL), EQUAL).cost <= apart


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_full_recomputation_fits_and_no_simple_schedule_that_fits_is_better(data, p, m, overlap):
    costs = data.draw(costs_with_r(p))
    limits = [data.draw(st.integers(1, 4 * p)) for _ in range(p)]
    simple = [with_recomputation(generate(name, p, m)) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")]
    options = {"overlap_communication": overlap}
    try:
        planned = generate("auto", p, m, costs=costs, memory_limit=limits, recompute=FULL, **options)
    except Infeasible as error:
        assert not any(fits(simulate(schedule, costs), limits) for schedule in simple)
        generate("auto", p, m, costs=costs, memory_limit=error.smallest_limit, recompute=FULL, **options)
        return
    checked(planned, costs)
    timeline = simulate(planned, costs, **options)
    assert fits(timeline, limits)
    assert timeline.cost >= lower_bounds(planned.placement, m, costs, limits, FULL).span * (1 - 1e-9)
    for schedule in simple:
        other = simulate(schedule, costs, **options)
        assert not fits(other, limits) or timeline.cost <= other.cost * (1 + 1e-9), schedule.name


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["zb-v", "v-half", "v-min"]), st.integers(1, 3), st.integers(1, 5))
def test_a_v_with_full_recomputation_is_no_worse_than_with_r_inserted(data, name, p, m):
    costs = data.draw(costs_with_r(2 * p))
    limits = [data.draw(st.integers(1, 8 * p)) for _ in range(p)]
    try:
        planned = generate(name, p, m, costs=costs, memory_limit=limits, recompute=FULL)
    except Infeasible as error:
        generate(name, p, m, costs=costs, memory_limit=error.smallest_limit, recompute=FULL)
        return
    timeline = checked(planned, costs)
    assert fits(timeline, limits)
    assert timeline.cost >= lower_bounds(planned.placement, m, costs, limits, FULL).span * (1 - 1e-9)
    try:
        inside = generate(name, p, m, costs=costs.recomputing_in_backward(), memory_limit=limits)
    except Infeasible:
        return
    other = simulate(with_recomputation(inside), costs)
    assert not fits(other, limits) or timeline.cost <= other.cost * (1 + 1e-9)


@pytest.mark.parametrize("name", ["auto", "zb-1p", "zb-2p", "zb-v", "v-min"])
def test_what_r_costs_changes_no_plan_that_keeps_everything(name):
    num_stages = 8 if name.startswith(("zb-v", "v-")) else 4
    costs = replace(StageCosts.uniform(num_stages, 3, 2, 1, 0.5), memory_f=(1.0, 1.25) * (num_stages // 2))
    with_r = replace(costs, time_r=tuple(range(num_stages)), memory_r=(0.5,) * num_stages)
    assert generate(name, 4, 6, costs=with_r) == generate(name, 4, 6, costs=costs)
