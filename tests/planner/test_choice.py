"""The preference among plans of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import Layout, Plan, PlanRequest
from megatron.zero_bubble.planner.choice import choose, named_after_schedule
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.generators.one_f_one_b import one_f_one_b
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation
from megatron.zero_bubble.schedule.simulate import simulate

LINEAR = Placement("linear", 2)
EVEN = Layout(LINEAR, (2, 2))
UNEVEN = Layout(LINEAR, (1, 3))
V = Layout(Placement("v", 2, 2), (1, 1, 1, 1))
SHARDS = replace(EVEN, vocabulary_parallel=True)
INTERLEAVED = Layout(Placement("interleaved", 2, 2), (1, 1, 1, 1))
SHARDS_IN_V = replace(V, vocabulary_parallel=True)


def plan(layout: Layout, time: float, *, recomputes: bool = False) -> Plan:
    """A plan of the layout that takes `time`."""
    schedule = one_f_one_b(2, 2)
    timeline = simulate(with_recomputation(schedule) if recomputes else schedule, default_costs(LINEAR, Recompute.FULL))
    request = PlanRequest("1f1b", 2, (LINEAR,))
    return Plan(request, layout, timeline, (0.0, 0.0), slowdown=time / request.time_of(timeline))


@pytest.mark.parametrize(
    ("times", "usual", "chosen"),
    [
        ([(EVEN, 100), (V, 97)], None, V),
        ([(EVEN, 100), (V, 98.5)], None, EVEN),  # simpler
        ([(EVEN, 100), (V, 99.9)], V, V),  # what is usual stays
        ([(EVEN, 97), (V, 100)], V, EVEN),
        ([(V, 102.5), (SHARDS, 100)], None, V),  # shards have to gain more
        ([(EVEN, 102.1), (INTERLEAVED, 101.9), (V, 100)], EVEN, V),  # a simpler layout has to gain as much
        ([(V, 103.1), (SHARDS, 102), (SHARDS_IN_V, 100)], None, SHARDS_IN_V),
        ([(EVEN, 103.01), (V, 101.95), (SHARDS_IN_V, 100)], EVEN, EVEN),  # neither V nor shards gain enough
        ([(V, 104), (SHARDS, 100)], None, SHARDS),
        ([(UNEVEN, 99.8), (EVEN, 100)], None, EVEN),  # partitions that differ by less than costs do
        ([(UNEVEN, 99), (EVEN, 100)], None, UNEVEN),
        ([(UNEVEN, 99.8), (EVEN, 100)], UNEVEN, UNEVEN),
    ],
)
def test_a_simpler_layout_is_chosen_unless_it_is_clearly_slower(
    times: Sequence[tuple[Layout, float]], usual: Layout | None, chosen: Layout
) -> None:
    assert choose([plan(layout, time) for layout, time in times], usual).layout == chosen


@pytest.mark.parametrize(("own_time", "chosen"), [(101.9, EVEN), (102.1, V)])
def test_the_usual_layout_stays_if_another_schedule_for_it_is_close(own_time: float, chosen: Layout) -> None:
    assert choose([plan(EVEN, 110), plan(V, 100)], EVEN, own_time).layout == chosen


def test_other_plans_are_the_best_of_their_combinations_from_the_shortest_on() -> None:
    plans = [plan(SHARDS, 130), plan(UNEVEN, 150), plan(V, 120), plan(EVEN, 100), plan(SHARDS, 140)]
    chosen = choose(plans, None)
    assert chosen.layout == EVEN
    assert [(other.layout, round(other.time, 6)) for other in chosen.others] == [(V, 120), (SHARDS, 130)]


def test_a_plan_that_recomputes_in_vain_is_left_out() -> None:
    recomputing, slower = replace(V, recompute=Recompute.PLANNED), replace(INTERLEAVED, recompute=Recompute.PLANNED)
    plans = [plan(EVEN, 100), plan(V, 120), plan(recomputing, 110), plan(INTERLEAVED, 130), plan(slower, 130)]
    assert [other.layout for other in choose(plans, None).others] == [recomputing, V, INTERLEAVED]


def test_a_plan_without_r_is_named_after_its_schedule() -> None:
    planned = replace(EVEN, recompute=Recompute.PLANNED)
    assert named_after_schedule(plan(planned, 100)).layout == EVEN
    assert named_after_schedule(plan(planned, 100, recomputes=True)).layout == planned
