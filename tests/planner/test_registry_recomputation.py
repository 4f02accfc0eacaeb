"""R in the planners: valid, within the limit, never worse than what needs no planning, and nothing without need."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate, placement_for, request_for
from megatron.zero_bubble.planner.auto import limits_of_multiple
from megatron.zero_bubble.planner.bounds import lower_bound
from megatron.zero_bubble.planner.memory_limit import MemoryLimit, one_f_one_b_peaks
from megatron.zero_bubble.planner.request import EFFORT, QUICK_EFFORT
from megatron.zero_bubble.schedule import Infeasible, Placement, StageCosts, simulate
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.kinds import BACKWARDS, OpKind
from megatron.zero_bubble.schedule.recomputation import Recompute, num_recomputed, with_recomputation
from tests.planner.planning import LITTLE, checked, random_costs

FULL, PLANNED = Recompute.FULL, Recompute.PLANNED
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


def recomputes_all(schedule):
    """Whether every microbatch has an R, except where its backward follows its F at once."""
    for ops in schedule.ops:
        recomputed = {op._replace(kind=OpKind.B) for op in ops if op.kind is OpKind.R}
        for before, op in pairwise(ops):
            follows = before == op._replace(kind=OpKind.F)
            if op.kind in BACKWARDS and op._replace(kind=OpKind.B) not in recomputed and not follows:
                return False
    return True


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 9))
def test_the_peak_of_1f1b_is_that_of_1f1b_with_the_same_recomputation(data, p, m):
    costs = data.draw(costs_with_r(p))
    peaks = simulate(generate("1f1b", p, m, recompute=FULL), costs).peak_memory
    assert one_f_one_b_peaks(Placement("linear", p), costs, m, FULL) == peaks
    request = request_for("zb-1p", p, m, costs=costs, recompute=FULL)
    limits = limits_of_multiple(1, request)
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert limits_of_multiple(2, request) == tuple(2 * limit for limit in limits)


def test_a_multiple_before_anything_is_measured():
    """1F1B with full recomputation holds four inputs, each a sixteenth of M_B, and one microbatch that is restored."""
    assert MemoryLimit(multiple=2).in_unit_costs(Placement("linear", 4), 8, FULL) == 2 * (4 / 16 + 15 / 16)
    assert MemoryLimit(multiple=2).in_unit_costs(Placement("linear", 4), 8, Recompute.PLANNED) == 8


@pytest.mark.parametrize(
    ("name", "inside", "apart"),
    [("1f1b", 92, 83), ("zb-h1", 78, 70), ("zb-h2", 71, 64), ("zb-1p", 92, 76), ("zb-2p", 92, 73)],
)
def test_r_of_its_own_gives_back_the_bubble_that_it_takes_inside_b(name, inside, apart):
    """An R apart takes no longer than stated, where ZB-1p and ZB-2p keep to the memory of 1F1B and ZB-H1 does not."""
    in_backward = EQUAL.recomputing_in_backward()
    assert simulate(generate(name, 8, 16, costs=in_backward), in_backward).cost == inside
    assert checked(generate(name, 8, 16, costs=EQUAL, recompute=FULL), EQUAL).cost <= apart


@settings(max_examples=15, deadline=None)
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
    assert recomputes_all(planned)
    assert timeline.cost >= lower_bound(planned.placement, m, costs, limits, FULL) * (1 - 1e-9)
    for schedule in simple:
        other = simulate(schedule, costs, **options)
        assert not fits(other, limits) or timeline.cost <= other.cost * (1 + 1e-9), schedule.name


@settings(max_examples=15, deadline=None)
@given(st.data(), st.sampled_from(["zb-v", "v-half", "v-min"]), st.integers(1, 3), st.integers(1, 5))
def test_a_v_with_full_recomputation_is_no_worse_than_with_r_inserted(data, name, p, m):
    costs = data.draw(costs_with_r(2 * p))
    limits = [data.draw(st.integers(1, 8 * p)) for _ in range(p)]
    options = {"memory_limit": limits, "effort": LITTLE}
    try:
        planned = generate(name, p, m, costs=costs, recompute=FULL, **options)
    except Infeasible as error:
        generate(name, p, m, costs=costs, memory_limit=error.smallest_limit, recompute=FULL, effort=LITTLE)
        return
    timeline = checked(planned, costs)
    assert fits(timeline, limits)
    assert recomputes_all(planned)
    assert timeline.cost >= lower_bound(planned.placement, m, costs, limits, FULL) * (1 - 1e-9)
    try:
        inside = generate(name, p, m, costs=costs.recomputing_in_backward(), **options)
    except Infeasible:
        return
    other = simulate(with_recomputation(inside), costs)
    assert not fits(other, limits) or timeline.cost <= other.cost * (1 + 1e-9)


def test_the_local_search_moves_nothing_between_a_forward_and_the_backward_that_follows_it_without_r():
    costs = StageCosts(
        time_f=(1, 1, 1, 1),
        time_b=(1, 1, 1, 3),
        time_w=(1, 1, 3, 1),
        time_comm=(0, 0, 0),
        memory_f=(1, 1, 1, 1),
        memory_b=(0, 0, 0, 0),
        memory_w=(-1, -1, -1, -1),
        time_r=(0, 0, 3, 0),
    )
    assert recomputes_all(generate("zb-v", 2, 2, costs=costs, memory_limit=[2, 3], recompute=FULL))


@pytest.mark.parametrize("name", ["auto", "zb-1p", "zb-2p", "zb-v", "v-min"])
def test_what_r_costs_changes_no_plan_that_keeps_everything(name):
    num_stages = 8 if name.startswith(("zb-v", "v-")) else 4
    costs = replace(StageCosts.uniform(num_stages, 3, 2, 1, 0.5), memory_f=(1.0, 1.25) * (num_stages // 2))
    with_r = replace(costs, time_r=tuple(range(num_stages)), memory_r=(0.5,) * num_stages)
    with_r, without = (generate(name, 4, 6, costs=each, effort=LITTLE) for each in (with_r, costs))
    assert with_r == without


PUBLISHED = StageCosts.uniform(8, 18.5, 18.1, 9.3, 0.6, time_r=18, memory_r=15 / 16)
"""About the times of the paper's smallest model."""


@pytest.mark.parametrize(("costs", "m"), [(EQUAL, 16), (PUBLISHED, 24)], ids=["equal", "published"])
@pytest.mark.parametrize("multiple", [0.6, pytest.param(0.8, marks=pytest.mark.exhaustive)])
def test_in_a_part_of_the_memory_planned_is_faster_than_keeping_and_than_dropping_everything(costs, m, multiple):
    limit = multiple * max(one_f_one_b_peaks(Placement("linear", 8), costs, m))
    options = {"memory_limit": limit, "effort": QUICK_EFFORT}
    kept, full, planned = (
        checked(generate("auto", 8, m, costs=costs, recompute=recompute, **options), costs) for recompute in Recompute
    )
    assert max(planned.peak_memory) <= limit
    assert planned.cost < 0.98 * min(kept.cost, full.cost)
    assert 0 < num_recomputed(planned.schedule) < num_recomputed(full.schedule)


@pytest.mark.parametrize(
    ("multiple", "effort"), [(0.6, QUICK_EFFORT), pytest.param(0.8, EFFORT, marks=pytest.mark.exhaustive)]
)
def test_in_a_v_planned_takes_a_shorter_iteration_than_keeping_and_than_dropping_everything(multiple, effort):
    costs = StageCosts.uniform(8, 9.25, 9.05, 4.65, 0.3, 0.5, -0.25, -0.25, time_r=9, memory_r=15 / 32)
    options = {"memory_limit": 4 * multiple, "effort": effort}
    kept, full, planned = (
        checked(generate("zb-v", 4, 8, costs=costs, recompute=recompute, **options), costs) for recompute in Recompute
    )
    assert max(planned.peak_memory) <= 4 * multiple
    assert planned.makespan < 0.98 * min(kept.makespan, full.makespan)
    assert 0 < num_recomputed(planned.schedule) < num_recomputed(full.schedule)


@pytest.mark.parametrize("name", ["auto", "zb-v"])
def test_nothing_is_recomputed_where_everything_fits(name):
    costs = default_costs(placement_for(name, 4), PLANNED)
    kept = generate(name, 4, 8, costs=costs)
    assert generate(name, 4, 8, costs=costs, recompute=PLANNED) == kept
    assert generate(name, 4, 8, costs=costs, recompute=PLANNED, memory_limit=8) == generate(
        name, 4, 8, costs=costs, memory_limit=8
    )
    enough = max(simulate(kept, costs).peak_memory)
    assert not generate(name, 4, 8, costs=costs, recompute=PLANNED, memory_limit=enough).recomputes


def check_smallest(name, p, m, costs, smallest, **options):
    """The limit that a refusal names works, and a smaller one is refused with the same one."""
    least = generate(name, p, m, costs=costs, memory_limit=smallest, recompute=PLANNED, **options)
    assert max(simulate(least, costs).peak_memory) <= smallest * (1 + 1e-9)
    with pytest.raises(Infeasible, match=f"{smallest:g} is enough for every rank"):
        generate(name, p, m, costs=costs, memory_limit=smallest * 0.999, recompute=PLANNED, **options)


def compare_planned(name, p, m, costs, limits, **options):
    """What is planned fits, is valid, and takes no longer than what keeps everything and what drops everything.

    The makespan decides, by which a planner judges that chooses what is recomputed.
    """
    try:
        planned = generate(name, p, m, costs=costs, memory_limit=limits, recompute=PLANNED, **options)
    except Infeasible as error:
        check_smallest(name, p, m, costs, error.smallest_limit, **options)
        return
    checked(planned, costs)
    timeline = simulate(planned, costs, **options)
    assert fits(timeline, limits)
    assert timeline.cost >= lower_bound(planned.placement, m, costs, limits, PLANNED) * (1 - 1e-9)
    for recompute in (Recompute.NONE, FULL):
        try:
            other = generate(name, p, m, costs=costs, memory_limit=limits, recompute=recompute, **options)
        except Infeasible:
            continue
        assert timeline.makespan <= simulate(other, costs, **options).makespan * (1 + 1e-9), recompute


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_planned_recomputation_fits_and_is_never_worse(data, p, m, overlap):
    costs = data.draw(costs_with_r(p))
    limits = [data.draw(st.integers(1, 4 * p)) for _ in range(p)]
    compare_planned("auto", p, m, costs, limits, overlap_communication=overlap)


@settings(max_examples=10, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_planned_recomputation_in_a_v_fits_and_is_never_worse(data, p, m):
    costs = data.draw(costs_with_r(2 * p))
    limits = [data.draw(st.integers(1, 8 * p)) for _ in range(p)]
    compare_planned("zb-v", p, m, costs, limits)


@pytest.mark.exhaustive  # the same on larger pipelines
@settings(max_examples=15, deadline=None)
@given(st.data(), st.sampled_from(["auto", "zb-v"]), st.integers(2, 6), st.integers(1, 16), st.booleans())
def test_planned_recomputation_of_larger_pipelines(data, name, p, m, overlap):
    chunks = 2 if name == "zb-v" else 1
    costs = data.draw(costs_with_r(chunks * p))
    limits = [data.draw(st.integers(2, 4 * chunks * p)) for _ in range(p)]
    compare_planned(name, p, m, costs, limits, overlap_communication=overlap)


@pytest.mark.parametrize("recompute", [FULL, PLANNED])
def test_the_solver_with_recomputation_is_no_worse_than_auto(recompute):
    pytest.importorskip("ortools", reason="the extra `solver` is not installed")
    costs = StageCosts.uniform(2, 3, 2, 1, 0.5, time_r=3, memory_r=0.75)
    cost = {
        name: checked(generate(name, 2, 3, costs=costs, memory_limit=1.75, recompute=recompute), costs).cost
        for name in ("optimal", "auto")
    }
    assert cost["optimal"] <= cost["auto"]
