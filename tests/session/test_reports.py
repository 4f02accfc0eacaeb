"""The block of lines that a job logs about a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.order_trial import TrialResult
from megatron.zero_bubble.runtime.plan_check import Difference
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.runtime.step_planner import OrderTimes
from megatron.zero_bubble.schedule import Placement, StageCosts
from megatron.zero_bubble.schedule.formats import Profile, profile_from_json
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session import profiling
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.reports import describe_plan, order_fields

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
    assert lines[1] == "     measured in both orders: 1f1b 98.0 ms, the planned order 99.0 ms: continuing with 1f1b"


def test_the_block_tells_what_r_takes_and_restores_where_anything_is_recomputed():
    mib = 2**20
    costs = StageCosts.uniform(2, memory_f=8 * mib, memory_b=-mib, memory_w=-7 * mib, time_r=1.25, memory_r=6 * mib)
    profile = Profile(Placement("linear", 2), costs, 0.0, {})
    for recompute, baseline in (
        (Recompute.FULL, "1F1B that recomputes in its backward"),
        (Recompute.PLANNED, "1F1B that keeps everything"),
    ):
        block = describe_plan(
            Report(Prediction(profile, generate("zb-h1", 2, 4), recompute), False, None, 6)
        ).splitlines()
        assert block[1].split("  ")[-3:] == ["kept by F (MiB)", "restored by R (MiB)", "for W (MiB)"]
        assert block[2].split() == ["0", "0", "1.00", "1.00", "1.00", "1.25", "0.00", "8.0", "6.0", "7.0"]
        assert block[-2].endswith(f"times as fast as {baseline}")
        assert len(block[1]) == len(block[2]) == len(block[3])


def test_the_block_tells_the_limit_of_each_rank_and_what_operations_need_inside():
    costs = StageCosts.uniform(3, memory_f=2**20, memory_b=-(2**19), memory_w=-(2**19))
    profile = Profile(Placement("linear", 3), costs, 0.0, {}, inside=(0.0, 2.0**21, 0.0))
    limits = (8.0 * 2**20, 6.0 * 2**20, 8.0 * 2**20)
    plan = RunSchedules.named("auto", 3).requesting(costs=costs, memory_limit=limits)
    block = describe_plan(Report(Prediction(profile, plan.schedule(4)), True, limits, 6))
    assert "schedule auto (planned) for 4 microbatches, memory limit 8.0 6.0 8.0 MiB" in block
    assert "temporary memory of operations on each rank, not in these peaks (MiB): 0.0, 2.0, 0.0" in block
    assert "above the memory limit" not in block
    quiet = Report(Prediction(replace(profile, inside=()), plan.schedule(4)), False, (2.0**20,) * 3, 6)
    assert "temporary memory" not in describe_plan(quiet)
    assert "memory limit 1.0 MiB" in describe_plan(quiet), "equal limits are told once"
    assert "above the memory limit" in describe_plan(quiet)


def test_where_iterations_interlock_the_time_is_that_of_the_gain():
    """The makespan of zb-v has idle ranks at both ends, which the next iteration fills."""
    profile = Profile(Placement("v", 4, 2), StageCosts.uniform(8), 0.0, {})
    prediction = Prediction(profile, generate("zb-v", 4, 8), interlocks=True)
    assert prediction.time < prediction.milliseconds
    block = describe_plan(Report(prediction, True, None, 6))
    assert f", {prediction.time:.1f} ms, {prediction.gain}" in block


def test_late_plans_are_told_in_an_interval_without_plans_in_time():
    assert order_fields(OrderTimes(num_late=1)) == " steps with an earlier order: 1 |"
    assert order_fields(OrderTimes()) == order_fields(None) == ""


def test_a_saved_profile_tells_waits_from_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The corrected times contain the waits of one order of operations."""
    waits = replace(PROFILE, costs=replace(PROFILE.costs, time_comm=(5.0,)))
    prediction = replace(PREDICTION, profile=waits, baseline_costs=PROFILE.costs)
    output = tmp_path / "profile.json"
    monkeypatch.setattr(profiling, "print_rank_0", print)
    profiling.report_plan(JobFlags(zero_bubble_profile_output=str(output)), Report(prediction, True, None, 14))
    saved = profile_from_json(output.read_text())
    assert (saved.costs.time_comm, saved.costs_without_waits.time_comm) == ((5.0,), PROFILE.costs.time_comm)
