"""The line at the end of a training: what it averages, what it compares with, and what it leaves out."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.prediction import MegatronsTime, Prediction
from megatron.zero_bubble.runtime.recorder import PipelineTime
from megatron.zero_bubble.schedule import Idle, Placement, StageCosts
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.session.run_summary import RunSummary


def prediction(schedule: str = "zb-h1", megatrons: MegatronsTime | None = None) -> Prediction:
    """Two ranks, four microbatches, 3 ms each: 1F1B takes 15 ms, and zb-h1 13 with a bubble of 1/13."""
    profile = Profile(Placement("linear", 2), StageCosts.uniform(2), 0.0, {})
    return Prediction(profile, generate(schedule, 2, 4), megatrons=megatrons)


def measured(milliseconds: float, bubble: float) -> PipelineTime:
    return PipelineTime(milliseconds, Idle(0.0, bubble))


def test_the_predictions_of_these_tests() -> None:
    assert (prediction().milliseconds, prediction().idle.bubble) == (13, pytest.approx(1 / 13))
    assert prediction().gain.times == pytest.approx(15 / 13)


def test_lines_since_the_plan_count_but_its_own() -> None:
    """The first line under a prediction has the planning in its time."""
    summary = RunSummary()
    summary.record(5, 900.0, measured(900.0, 0.5), None)
    summary.record(10, 900.0, measured(900.0, 0.4), prediction())
    assert summary.line is None
    summary.record(15, 15.0, measured(13.0, 1 / 13), prediction())
    summary.record(20, 15.0, measured(13.0, 1 / 13), prediction())
    assert summary.line == (
        " > iterations 11 to 20: 15.0 ms each, 13.0 ms of it in the pipeline, 13.0 predicted; "
        "bubble rate 7.69% measured, 7.69% predicted; "
        "1F1B is predicted to take 17.0 ms, 1.133 times as long"
    )


def line_of(milliseconds: float, in_pipeline: PipelineTime, predicted: Prediction) -> str:
    summary = RunSummary()
    for iteration in (5, 10):
        summary.record(iteration, milliseconds, in_pipeline, predicted)
    assert summary.line is not None
    return summary.line


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_operations_that_take_longer_also_take_longer_under_1f1b(slower: float) -> None:
    line = line_of(13.0 * slower, measured(13.0 * slower, 1 / 13), prediction())
    assert line.endswith(f"1F1B is predicted to take {15 * slower:.1f} ms, 1.154 times as long")


def test_a_larger_bubble_than_predicted_does_not_count_for_1f1b() -> None:
    """12 ms of work in 20."""
    assert line_of(20.0, measured(20.0, 0.4), prediction()).endswith("take 15.0 ms, 0.750 times as long")


@pytest.mark.parametrize(("megatrons", "is_slower"), [(16.5, False), (15.5, True)])
def test_a_run_slower_than_megatrons_split_names_the_flag_that_keeps_it(megatrons: float, is_slower: bool) -> None:
    predicted = prediction(megatrons=MegatronsTime(megatrons, work=6.0))
    line = line_of(18.0, measured(16.0, 0.25), predicted)
    assert f"; 1F1B on Megatron's split is predicted to take {megatrons + 2} ms" in line
    assert line.endswith(": --zero-bubble-keep-layout keeps Megatron's split") is is_slower


def test_the_wait_at_the_end_of_an_iteration_is_no_time_outside_of_the_pipeline() -> None:
    """In zb-v, no rank works from the first operation of the pipeline to the last."""
    profile = Profile(Placement("v", 4, 2), StageCosts.uniform(8), 0.0, {})
    predicted = Prediction(profile, generate("zb-v", 4, 8))
    span, makespan, of_1f1b = predicted.timeline.cost, predicted.milliseconds, 6 * (8 + 3)
    assert span < makespan < of_1f1b
    line = line_of(2 * makespan + 7, measured(2 * span, predicted.idle.bubble), predicted)
    assert f"1F1B is predicted to take {2 * of_1f1b + 7:.1f} ms" in line


def test_a_new_plan_begins_anew() -> None:
    summary = RunSummary()
    for iteration, name in ((5, "1f1b"), (10, "1f1b"), (15, "zb-h1"), (20, "zb-h1")):
        summary.record(iteration, iteration * 10, measured(1.0, 0.1), prediction(name))
    assert summary.line is not None
    assert summary.line.startswith(
        " > iterations 16 to 20: 200.0 ms each, 1.0 ms of it in the pipeline, 13.0 predicted; "
    )


@pytest.mark.parametrize("time", [None, measured(1.0, 0.2)])
def test_without_a_plan_there_is_nothing_to_say(time: PipelineTime | None) -> None:
    summary = RunSummary()
    for iteration in (5, 10, 15):
        summary.record(iteration, 0.1, time, None)
    assert summary.line is None
