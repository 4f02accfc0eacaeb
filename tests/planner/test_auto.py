from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.bounds import lower_bound
from megatron.zero_bubble.planner.request import EFFORT, QUICK_EFFORT
from megatron.zero_bubble.schedule import Infeasible, Placement, StageCosts, lower, simulate, validate
from tests.planner.planning import ROWS, checked, random_costs, row_costs, row_id

EIGHTHS = range(4, 21)


def cost_of(name, p, m, costs, **options):
    return simulate(generate(name, p, m, costs=costs, **options), costs).cost


@pytest.mark.parametrize("row", ROWS, ids=row_id)
@pytest.mark.parametrize(("name", "factor"), [("zb-1p", 1), ("zb-2p", 2)])
def test_no_worse_than_published(row, name, factor):
    p, m, costs = row["num_stages"], row["num_microbatches"], row_costs(row)
    timeline = simulate(generate(name, p, m, costs=costs, effort=QUICK_EFFORT), costs)
    assert round(timeline.bubble_rate, 4) <= row["bubble_rate"][name]
    assert max(timeline.peak_memory) <= factor * p
    bound = lower_bound(Placement("linear", p), m, costs, factor * p)
    assert timeline.cost <= bound * (1.005 if name == "zb-2p" else 1 + 1e-9)


LARGER = (pytest.param(row, EFFORT, id=row_id(row), marks=pytest.mark.exhaustive) for row in (ROWS[3], ROWS[5]))


@pytest.mark.parametrize(("row", "effort"), [pytest.param(ROWS[0], QUICK_EFFORT, id=row_id(ROWS[0])), *LARGER])
def test_more_memory_never_costs_time_and_nothing_published_is_better(row, effort):
    p, m, costs = row["num_stages"], row["num_microbatches"], row_costs(row)
    rates = []
    for eighths in EIGHTHS:
        limit = p * eighths / 8
        timeline = simulate(generate("auto", p, m, costs=costs, memory_limit=limit, effort=effort), costs)
        assert max(timeline.peak_memory) <= limit
        rates.append(timeline.bubble_rate)
    assert all(more <= less + 1e-12 for less, more in itertools.pairwise(rates))
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"):
        published = simulate(generate(name, p, m, costs=costs, effort=effort), costs)
        first = next(rate for e, rate in zip(EIGHTHS, rates, strict=True) if p * e / 8 >= max(published.peak_memory))
        assert first <= published.bubble_rate + 1e-12
        assert round(first, 4) <= row["bubble_rate"][name]


def with_vocabulary(p, head, embedding=0.1, layers=3):
    """Costs of p stages of some layers; the last also has the vocabulary projection, the first the embedding."""
    layer = [time / layers for time in (29.7, 29.4, 19.9)]
    extra = [[0.0] * p for _ in layer]
    for kind, time in enumerate(layer):
        extra[kind][-1] += head * time
    for kind in (0, 2):
        extra[kind][0] += embedding * layer[kind]
    times = [tuple(layers * time + e for e in each) for time, each in zip(layer, extra, strict=True)]
    return StageCosts(*times, (0.5,) * (p - 1), (1,) * p, (-0.5,) * p, (-0.5,) * p)


@pytest.mark.parametrize("head", [0.3, 0.6, 1, 2])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24)])
def test_unequal_stages_are_planned_for(p, m, head):
    costs = with_vocabulary(p, head)
    equal = StageCosts.uniform(p, 29.7, 29.4, 19.9, 0.5)
    for factor, name in ((1, "zb-1p"), (2, "zb-2p")):
        planned = cost_of("auto", p, m, costs, memory_limit=factor * p, effort=QUICK_EFFORT)
        assert planned <= simulate(generate(name, p, m, costs=equal, effort=QUICK_EFFORT), costs).cost + 1e-9
        gain = 1 - planned / simulate(generate("zb-h1", p, m), costs).cost
        assert gain > (0.01 if factor == 1 else 0.05)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 9))
def test_every_limit_gets_a_schedule_that_fits(data, p, m):
    costs = data.draw(random_costs(p))
    limits = [data.draw(st.integers(memory, 3 * p * memory)) for memory in costs.memory_f]
    timeline = checked(generate("auto", p, m, costs=costs, memory_limit=limits), costs)
    assert all(peak <= limit for peak, limit in zip(timeline.peak_memory, limits, strict=True))
    assert timeline.cost >= lower_bound(Placement("linear", p), m, costs, limits) * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_too_low_a_limit_names_the_smallest_that_works(data, p, m):
    costs = data.draw(random_costs(p))
    with pytest.raises(Infeasible) as error:
        generate("auto", p, m, costs=costs, memory_limit=max(costs.memory_f) * 0.999)
    smallest = error.value.smallest_limit
    assert max(simulate(generate("auto", p, m, costs=costs, memory_limit=smallest), costs).peak_memory) <= smallest
    with pytest.raises(Infeasible, match=rf"{smallest:g} is enough"):
        generate("auto", p, m, costs=costs, memory_limit=smallest * (1 - 1e-6))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["1f1b", "zb-h1", "zb-h2"]))
def test_never_worse_than_the_handcrafted_ones_in_their_memory(data, p, m, name):
    costs = data.draw(random_costs(p))
    published = simulate(generate(name, p, m, costs=costs), costs)
    planned = simulate(generate("auto", p, m, costs=costs, memory_limit=published.peak_memory), costs)
    assert planned.cost <= published.cost * (1 + 1e-9)


def test_memory_that_stays_for_ever_is_counted():
    """W releases less than F took: each microbatch leaves 0.1 behind."""
    costs = StageCosts.uniform(2, memory_f=1, memory_b=-0.5, memory_w=-0.4)
    with pytest.raises(Infeasible) as error:
        generate("auto", 2, 6, costs=costs, memory_limit=1)
    assert error.value.smallest_limit == pytest.approx(1.5)
    timeline = checked(generate("auto", 2, 6, costs=costs, memory_limit=1.5), costs)
    assert max(timeline.peak_memory) == pytest.approx(1.5)


def test_a_plan_whose_b_allocates_fits_in_the_limit():
    costs = StageCosts.uniform(3, memory_f=1, memory_b=0.25, memory_w=-1.25)
    timeline = checked(generate("auto", 3, 6, costs=costs, memory_limit=1.25), costs)
    assert max(timeline.peak_memory) <= 1.25
    with pytest.raises(Infeasible):
        generate("auto", 3, 6, costs=costs, memory_limit=1.2)


def test_plans_are_the_same_every_time():
    costs = with_vocabulary(4, 0.5)
    assert generate("auto", 4, 10, costs=costs) == generate("auto", 4, 10, costs=costs)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_with_activation_recomputation_never_slower_than_1f1b_in_its_memory(p: int):
    """B adds memory there: what it recomputes lives until W."""
    costs = StageCosts.uniform(p, 1, 2, 0.5, memory_f=0.1, memory_b=0.4, memory_w=-0.5)
    limit = p * 0.1 + 0.4
    planned = generate("auto", p, 2 * p, costs=costs, memory_limit=limit, effort=QUICK_EFFORT)
    validate(lower(planned))
    timeline = simulate(planned, costs)
    assert timeline.cost <= simulate(generate("1f1b", p, 2 * p), costs).cost
    assert max(timeline.peak_memory) <= limit


def test_a_job_whose_step_waits_for_all_ranks_gets_the_shorter_makespan():
    """A short span of every rank is no use then: the last stage, which is longer, would only begin later."""
    costs = StageCosts.uniform(8, 10, 11, 8, 0.3)
    last = {
        name: (*getattr(costs, name)[:-1], time) for name, time in (("time_f", 12), ("time_b", 12.1), ("time_w", 10.4))
    }
    costs = replace(costs, **last)
    by_span, by_makespan = (
        simulate(generate("auto", 8, 16, costs=costs, memory_limit=8.0, takes_makespan=takes), costs)
        for takes in (False, True)
    )
    assert by_makespan.makespan < min(626, by_span.makespan)
    assert by_makespan.cost >= by_span.cost
    interlocked = generate("auto", 8, 16, costs=costs, memory_limit=8.0, takes_makespan=True, post_validation=True)
    assert interlocked == by_span.schedule
