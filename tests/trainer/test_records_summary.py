"""The line at the end of a training: what it averages, and what it leaves out."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner.prediction import Gain
from megatron.zero_bubble.schedule import Idle
from megatron.zero_bubble.trainer.records import RunSummary

FIRST, SECOND = Idle(0.1, 0.06), Idle(0.1, 0.05)


def gain(times: float, over: str = "1F1B", *, is_over_other_layout: bool = False) -> Gain:
    return Gain(times, over, is_over_other_layout)


def test_lines_since_the_plan_count_but_its_own() -> None:
    """The first line under a prediction has the planning in its time."""
    summary = RunSummary()
    summary.record(5, 5, 9.0, Idle(0.1, 0.5), None, None)
    summary.record(10, 5, 9.0, Idle(0.1, 0.4), FIRST, gain(1.1))
    assert summary.line is None
    summary.record(15, 5, 0.1, Idle(0.1, 0.10), FIRST, gain(1.1))
    summary.record(20, 15, 0.2, Idle(0.1, 0.02), FIRST, gain(1.1))
    assert summary.line == (
        " > iterations 11 to 20: 175.0 ms each; bubble rate 4.00% measured, 6.00% predicted; "
        "predicted to be 1.100 times as fast as 1F1B"
    )


@pytest.mark.parametrize(("times", "is_slower"), [(1.216, False), (1.02, True)])
def test_a_run_slower_than_megatrons_split_names_the_flag_that_keeps_it(times: float, is_slower: bool) -> None:
    """The bubble is 10% where 6% was predicted; that operations take longer does not count."""
    summary = RunSummary()
    predicted = gain(times, "1F1B on Megatron's split", is_over_other_layout=True)
    for iteration in (5, 10):
        summary.record(iteration, 5, 0.1, Idle(0.1, 0.1), FIRST, predicted)
    assert summary.line is not None
    assert f"predicted to be {times:.3f} times as fast as 1F1B on Megatron's split" in summary.line
    slower = (
        "; but with the measured bubble it is 0.977 times as fast: --zero-bubble-keep-layout keeps Megatron's split"
    )
    assert summary.line.endswith(slower) is is_slower


def test_a_new_plan_begins_anew() -> None:
    summary = RunSummary()
    for iteration, predicted in ((5, FIRST), (10, FIRST), (15, SECOND), (20, SECOND)):
        summary.record(iteration, 5, iteration / 100, Idle(0.0, 0.1), predicted, gain(1.2))
    assert summary.line is not None
    assert summary.line.startswith(" > iterations 16 to 20: 200.0 ms each; bubble rate 10.00% measured, 5.00%")


@pytest.mark.parametrize("measured", [None, Idle(0.1, 0.2)])
def test_without_a_plan_there_is_nothing_to_say(measured: Idle | None) -> None:
    summary = RunSummary()
    for iteration in (5, 10, 15):
        summary.record(iteration, 5, 0.1, measured, None, None)
    assert summary.line is None
