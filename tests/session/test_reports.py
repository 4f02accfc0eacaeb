"""The block of lines that a job logs about a plan."""

from __future__ import annotations

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.runtime.order_trial import TrialResult
from megatron.zero_bubble.runtime.plan_check import Difference
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.schedule import StageCosts
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.session.reports import describe_plan

SCHEDULE = generate("zb-h1", 2, 4)
PROFILE = Profile(SCHEDULE.placement, StageCosts.uniform(2, 3, 2, 1, 0.1, 2**20, -(2**19), -(2**19)), 0.015, {})
PREDICTION = Prediction(PROFILE, SCHEDULE)


def test_a_first_plan_says_where_its_times_are_from():
    first, *others = describe_plan(Report(PREDICTION, True, (2.0**21,) * 2, 6)).splitlines()
    assert first == " > zero-bubble plan; times measured up to step 6, spread 1.5%"
    assert others[0].split()[:2] == ["stage", "rank"]
    assert "     schedule zb-h1 (planned) for 4 microbatches, memory limit 2.0 MiB" in others


def test_a_corrected_plan_says_what_the_one_before_had_wrong():
    wrong = (Difference("F of stage 1 takes", 2.5, 3.0), Difference("ranks wait as if a message took", 0.02, 0.1))
    lines = describe_plan(Report(PREDICTION, False, None, 14, wrong)).splitlines()
    assert lines[1] == (
        "     compared with the plan before: F of stage 1 takes 3.00 ms, 2.50 were planned; "
        "ranks wait as if a message took 0.10 ms, 0.02 were planned"
    )
    assert "     schedule zb-h1 (kept) for 4 microbatches" in lines


def test_a_trial_of_both_orders_says_what_was_measured():
    lines = describe_plan(Report(PREDICTION, True, None, 22, trial=TrialResult("1f1b", 98.0, 99.0))).splitlines()
    assert lines[1] == "     measured in both orders: 1f1b 98.0 ms, the planned order 99.0 ms: it gives way to 1f1b"
