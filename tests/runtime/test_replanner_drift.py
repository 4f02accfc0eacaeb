"""A run is planned again when its steps show that the costs of the plan were wrong or have drifted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from replanned_run import GIVEN, Run

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.prediction import MegatronsTime
from megatron.zero_bubble.planner.run_schedules import RunSchedules, prepare
from megatron.zero_bubble.runtime import replanner
from megatron.zero_bubble.schedule import Schedule, StageCosts
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation_everywhere

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_plan_is_compared_once_with_the_steps_that_ran_it():
    """The first two of the eight steps after the plan do not count, nor does the slowest, which may be interrupted."""
    run = Run()
    run.steps(3)
    run.steps(2, (9.0, 9.0, 9.0))
    run.steps(3, (2.5, 1.0, 1.0))
    run.steps(1, (9.0, 9.0, 9.0))
    run.steps(2, (1.25, 1.0, 1.0))
    run.steps(60, (5.0, 5.0, 5.0))
    first, second = run.reports
    assert [str(one) for one in second.differences] == ["F of stage 0 takes 2.00 ms, 1.00 were planned"]
    assert second.step == 11
    costs = second.prediction.profile.costs
    assert [times[0] for times in (costs.time_f, costs.time_b, costs.time_w)] == pytest.approx([2.0, 1.0, 1.0])
    assert run.replanner.profile is second.prediction.profile
    assert first.differences == ()


def test_a_plan_that_is_no_slower_stays():
    """On one rank every order takes the same time."""
    run = Run()
    run.steps(3)
    run.steps(8, (2.0, 2.0, 2.0))
    assert run.new_plans == [4]
    assert [report.is_new_plan for report in run.reports] == [True, False]
    assert run.reports[1].prediction.schedule is run.plan.schedule(2)


def test_a_faster_plan_for_the_corrected_costs_replaces_the_one_that_runs(monkeypatch):
    run = Run()
    run.steps(3)
    better = prepare(generate("zb-h1", 1, 2))
    # The makespan decides, not the longest span of a rank.
    timeline_of = {
        "auto": SimpleNamespace(cost=1.0, makespan=2.0),
        "zb-h1": SimpleNamespace(cost=2.0, makespan=1.0),
    }
    monkeypatch.setattr(replanner, "simulate", lambda schedule, costs: timeline_of[schedule.name])
    monkeypatch.setattr(replanner, "plan_on_first_rank", lambda plan, m: plan.with_shared(better))
    run.steps(8, (2.0, 2.0, 2.0))
    assert run.new_plans == [4, 12]
    assert run.reports[-1].is_new_plan
    assert run.plan.schedule(2) is better


def test_megatrons_own_schedule_takes_as_much_longer_as_the_operations():
    run = Run(megatrons=MegatronsTime(milliseconds=12.0, work=3.0))
    run.steps(3)
    before = run.replanner.predict(run.plan.schedule(2))
    run.steps(8, (2.0, 2.0, 2.0))
    after = run.reports[-1].prediction
    assert after.gain.times * after.milliseconds == pytest.approx(2 * before.gain.times * before.milliseconds)


def test_waits_that_correct_the_messages_of_a_plan_do_not_slow_down_the_1f1b_of_its_speed_up(monkeypatch):
    """Only the order that ran is known to wait."""

    def waiting(costs: StageCosts, schedule: Schedule, span: float) -> StageCosts:
        return replace(costs, latency_collective=(7.0,))

    monkeypatch.setattr(replanner, "with_measured_span", waiting)
    monkeypatch.setattr(replanner, "SPAN_TOLERANCE", -1.0)
    run = Run()
    run.steps(3)
    run.steps(8, (2.0, 2.0, 2.0))
    prediction = run.replanner.predict(run.plan.schedule(2))
    baseline = prediction.baseline_costs
    assert baseline is not None
    assert prediction.profile.costs.latency_collective == (7.0,)
    assert baseline == replace(prediction.profile.costs, latency_collective=baseline.latency_collective)
    assert baseline.latency_collective == run.reports[0].prediction.profile.costs.latency_collective


def test_a_plan_that_the_steps_confirm_is_not_mentioned_again():
    run = Run()
    run.steps(3)
    run.steps(30, (1.04, 1.04, 1.04))
    assert (run.new_plans, len(run.reports)) == ([4], 1)


def test_a_plan_is_not_compared_with_steps_of_several_numbers_of_microbatches():
    run = Run()
    run.steps(6)
    run.steps(30, (2.0, 2.0, 2.0), m=3)
    assert [report.differences for report in run.reports] == [(), ()]


def test_a_given_profile_is_not_compared():
    run = Run(profile=GIVEN)
    run.steps(30)
    assert len(run.reports) == 1


def test_without_a_threshold_later_drift_changes_nothing():
    run = Run()
    run.steps(11)
    run.steps(60, (9.0, 9.0, 9.0))
    assert run.new_plans == [4]
    assert len(run.reports) == 1


@pytest.mark.parametrize(("milliseconds", "replanned_at"), [(1.2, []), (1.3, [21]), (0.7, [21])])
def test_a_run_is_planned_again_when_its_times_drift_by_more_than_the_threshold(milliseconds, replanned_at):
    run = Run(threshold=0.25)
    run.steps(11)
    run.steps(30, (milliseconds,) * 3)
    assert run.new_plans == [4, *replanned_at]
    if replanned_at:
        assert run.reports[-1].step == 20
        assert run.reports[-1].prediction.profile.costs.time_f[0] == pytest.approx(milliseconds)


def test_drift_is_looked_for_between_two_looks_not_since_the_start():
    """A slow machine that has become fast again is planned for twice."""
    run = Run(threshold=0.25)
    run.steps(20)
    run.steps(20, (2.0, 2.0, 2.0))
    run.steps(20)
    run.steps(20)
    assert run.new_plans == [4, 41, 61]


def test_drift_leaves_memory_messages_and_model_as_they_were():
    run = Run(profile=GIVEN, threshold=0.25)
    run.steps(20, (1.0, 1.0, 1.0))
    new = run.reports[-1].prediction.profile
    assert new.costs.time_f[0] == pytest.approx(1.0)
    assert (new.costs.memory_f, new.costs.memory_w, new.costs.time_comm) == (
        GIVEN.costs.memory_f,
        GIVEN.costs.memory_w,
        GIVEN.costs.time_comm,
    )
    assert (new.placement, new.model) == (GIVEN.placement, GIVEN.model)
    assert run.reports[-1].prediction.profile is run.replanner.profile


@pytest.mark.parametrize(
    ("times", "recomputes", "time_r", "replanned"),
    [
        ((1.0, 1.0, 1.0, 1.1), True, None, False),
        ((1.0, 1.0, 1.0, 3.0), True, 3.0, True),
        ((2.0, 2.0, 2.0), False, 2.0, True),
    ],
)
def test_drift_counts_recomputations_and_where_there_are_none_they_drift_as_f_does(
    times, recomputes, time_r, replanned
):
    profile = replace(GIVEN, costs=StageCosts.uniform(1, 1, 1, 1, 0, 100, -50, -50, time_r=1, memory_r=90))
    given = RunSchedules.of(with_recomputation_everywhere(generate("1f1b", 1, 2)))
    plan = given.requesting(recomputes=(Recompute.FULL,))
    run = Run(plan if recomputes else RunSchedules.named("zb-h1", 1), profile=profile, threshold=0.25)
    run.steps(20, times)
    assert len(run.reports) == 1 + replanned
    if replanned:
        assert run.reports[-1].prediction.profile.costs.time_r == (pytest.approx(time_r),)
