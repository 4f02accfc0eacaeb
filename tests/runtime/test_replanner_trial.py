"""A run measures megatron-core's own order beside the planned order once, and goes on with the faster one."""

from __future__ import annotations

import pytest
from replanned_run import GIVEN, Run

from megatron.zero_bubble.planner.prediction import MegatronsTime
from megatron.zero_bubble.runtime import replanner

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(("fused", "kept"), [(0.8, "1f1b"), (1.2, "auto")])
def test_megatrons_own_order_is_tried_once_and_goes_on_if_it_is_faster(fused: float, kept: str) -> None:
    """On one rank both orders take the same time, but for the time of a backward that computes both gradients."""
    run = Run(tries_own_order=True)
    run.fused = fused
    run.steps(60)
    assert run.new_plans == [4, 12, 20, *([28] if kept == "1f1b" else [])]
    assert run.plan.schedule(2).name == kept
    *_, report = run.reports
    assert report.trial is not None
    assert (report.trial.baseline_name, report.step) == ("1f1b", 27)
    assert report.trial.planned_span == pytest.approx(6.0)
    assert report.trial.baseline_span == pytest.approx(2 * (1 + 2 * fused))
    gain = fused if kept == "auto" else 1.0
    assert report.prediction.gain.times == pytest.approx((1 + 2 * gain) / 3 if kept == "auto" else 1.0)
    assert not report.prediction.gain.is_over_other_layout
    assert report.prediction.schedule.name == kept


@pytest.mark.parametrize(
    "options",
    [
        {"tries_own_order": False},
        {"tries_own_order": True, "megatrons": MegatronsTime(milliseconds=6.0, work=3.0)},
        {"tries_own_order": True, "profile": GIVEN},
    ],
)
def test_the_own_order_is_not_tried_in_another_layout_or_for_a_given_profile(options) -> None:
    run = Run(**options)
    run.fused = 0.5
    run.steps(60)
    assert run.plan.schedule(2).name == "auto"
    assert all(report.trial is None for report in run.reports)


def test_the_own_order_is_not_tried_where_the_plan_is_predicted_to_be_much_faster(monkeypatch) -> None:
    monkeypatch.setattr(replanner, "SMALL_GAIN", 1.0)
    run = Run(tries_own_order=True)
    run.steps(60)
    assert run.new_plans == [4]


def test_the_own_order_is_not_tried_if_microbatches_differ_in_size() -> None:
    run = Run(tries_own_order=True)
    run.replanner.let_microbatches_differ()
    run.steps(60)
    assert run.new_plans == [4]


@pytest.mark.parametrize("steps_before", [12, 15, 18])
def test_a_trial_that_another_number_of_microbatches_interrupts_decides_nothing(steps_before: int) -> None:
    run = Run(tries_own_order=True)
    run.fused = 0.5
    run.steps(steps_before)
    assert run.plan.schedule(2).name == "1f1b"
    for _ in range(20):
        run.steps(1, m=3)
        assert run.plan.schedule(3).name == "auto"
        run.steps(1, m=2)
        assert run.plan.schedule(2).name == "auto"
    assert all(report.trial is None for report in run.reports)


def test_known_numbers_of_microbatches_that_alternate_in_a_trial_decide_nothing() -> None:
    run = Run(tries_own_order=True)
    run.fused = 0.5
    run.steps(4)
    run.steps(1, m=3)
    run.steps(7)
    assert run.plan.schedule(2).name == "1f1b"
    for _ in range(5):
        run.steps(1, m=3)
        run.steps(1, m=2)
    assert run.plan.schedule(2).name == "auto"
    assert all(report.trial is None for report in run.reports)


def test_drift_is_not_looked_for_during_a_trial() -> None:
    run = Run(tries_own_order=True, last_step=9, threshold=0.1)
    run.steps(17)
    run.steps(8, (9.0, 9.0, 9.0))
    assert run.plan.schedule(2).name == "auto", "the planned order was faster when it was measured"
    run.steps(15, (9.0, 9.0, 9.0))
    assert [report.step for report in run.reports] == [9, 33, 40]


def test_the_own_order_stays_for_other_numbers_of_microbatches() -> None:
    run = Run(tries_own_order=True)
    run.fused = 0.5
    run.steps(30)
    run.steps(5, m=3)
    assert run.plan.schedule(3).name == "1f1b"


def test_a_machine_that_slows_down_steadily_favours_neither_order() -> None:
    run = Run(tries_own_order=True)
    run.steps(11)
    for time in (1.1, 1.2):
        run.steps(8, (time, time, time))
    trial = run.reports[-1].trial
    assert trial is not None
    assert trial.planned_span == pytest.approx(trial.baseline_span)
