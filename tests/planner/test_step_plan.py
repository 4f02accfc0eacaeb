"""The plan of a step keeps the memory limit for any microbatches that fit one after the other."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner.generate import request_for
from megatron.zero_bubble.planner.microbatch_order import _Step
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.planner.step_plan import StepPlan, plan_step
from megatron.zero_bubble.schedule import Infeasible, StageCosts
from megatron.zero_bubble.schedule.recomputation import Recompute, num_recomputed


def costs_of(length: float, p: int) -> StageCosts:
    costs = StageCosts.uniform(p, length, length, length, 0.1, length, -length / 2, -length / 2)
    return replace(costs, time_r=(0.2 * length,) * p, memory_r=(0.9 * length,) * p)


def run_of(p: int, limit: float, recompute: Recompute = Recompute.NONE) -> RunSchedules:
    """The schedules of a run that were planned for microbatches of length 1."""
    costs = costs_of(1.0, p)
    return RunSchedules(request_for("auto", p, 1, costs=costs, memory_limit=limit, recompute=recompute))


def peaks(planned: StepPlan, costs: list[StageCosts]) -> list[float]:
    step = _Step(planned.schedule, costs, (), interlocks=False, overlap_communication=True)
    return step.peaks(planned.order.places)


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(2, 6), st.sampled_from([Recompute.NONE, Recompute.PLANNED]))
def test_what_fits_alone_fits(data: st.DataObject, p: int, m: int, recompute: Recompute):
    lengths = data.draw(st.lists(st.floats(0.1, 6), min_size=m, max_size=m))
    limit = max(1.0, *lengths) * 1.001
    costs = [costs_of(length, p) for length in lengths]
    planned = plan_step(run_of(p, limit, recompute), costs, limits=(limit,) * p)
    assert max(peaks(planned, costs)) <= limit
    assert sorted(planned.order.places) == list(range(m))


def test_the_run_s_own_schedule_is_taken_where_it_fits():
    plan, costs = run_of(3, 3.0), [costs_of(1.0, 3)] * 6
    planned = plan_step(plan, costs, limits=(3.0,) * 3)
    assert (planned.level, planned.schedule) == (0, plan.schedule(6))


def test_long_microbatches_take_a_schedule_with_fewer_in_flight():
    costs = [costs_of(2.0, 3)] * 6
    planned = plan_step(run_of(3, 4.0), costs, limits=(4.0,) * 3)
    assert planned.level > 0
    assert max(peaks(planned, costs)) <= 4.0
    unlimited = plan_step(run_of(3, 4.0), costs, limits=(inf,) * 3)
    assert planned.order.time > unlimited.order.time


def test_what_may_be_recomputed_is_recomputed_before_fewer_are_in_flight():
    costs = [costs_of(2.0, 3)] * 8
    kept, recomputed = (
        plan_step(run_of(3, 4.0, recompute), costs, limits=(4.0,) * 3)
        for recompute in (Recompute.NONE, Recompute.PLANNED)
    )
    assert num_recomputed(kept.schedule) == 0 < num_recomputed(recomputed.schedule)
    assert recomputed.order.time < kept.order.time


def test_pipelines_agree_on_a_schedule():
    """Another replica needs the second level."""
    plan = run_of(3, 3.0)
    planned = plan_step(plan, [costs_of(1.0, 3)] * 6, limits=(3.0,) * 3, least_level=2)
    assert planned.level == 2
    assert planned.schedule == plan.in_less_memory(6, 2)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.PLANNED])
def test_a_microbatch_that_does_not_fit_alone_is_named(recompute: Recompute):
    costs = [costs_of(length, 2) for length in (1.0, 1.0, 9.0, 1.0)]
    names = [f"microbatch {number} ({tokens} tokens)" for number, tokens in enumerate((10, 10, 90, 10))]
    with pytest.raises(
        Infeasible, match=r"need 9 .* on rank \d, .* limit of 4; the largest, microbatch 2 \(90 tokens\)"
    ):
        plan_step(run_of(2, 4.0, recompute), costs, limits=(4.0, 4.0), names=names)


def test_a_schedule_without_a_limit_to_lower_stays():
    plan = RunSchedules(request_for("zb-h1", 2, 1))
    assert plan.in_less_memory(4, 1) is None
    with pytest.raises(Infeasible):
        plan_step(plan, [costs_of(5.0, 2)] * 4, limits=(6.0, 6.0))
