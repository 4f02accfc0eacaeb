"""A run is planned from the steps of its window or from a given profile, within its memory limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from replanned_run import GIVEN, MODEL, Run

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.memory_limit import MemoryLimit, beside_states
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime import replanner
from megatron.zero_bubble.runtime.device import limits_of_ranks
from megatron.zero_bubble.runtime.joint import plan_on_first_rank
from megatron.zero_bubble.schedule import OpKind, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.kinds import PAIRED
from megatron.zero_bubble.schedule.recomputation import Recompute

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_run_is_planned_after_its_window_from_the_steps_in_it():
    run = Run()
    run.steps(1, (100.0, 100.0, 100.0))  # before the window
    run.steps(2, (3.0, 2.0, 1.0))
    run.steps(3, (100.0, 100.0, 100.0))
    assert run.new_plans == [4]
    (report,) = run.reports
    assert (report.step, report.is_new_plan, report.memory_limit) == (3, True, None)
    costs = report.prediction.profile.costs
    assert costs.time_f[0] == pytest.approx(3.0)
    assert costs.time_b[0] == pytest.approx(2.0)
    assert costs.time_w[0] == pytest.approx(1.0)
    assert report.prediction.profile.model == MODEL
    assert report.prediction.schedule == run.plan.schedule(2)
    assert run.edges_measured_at == [3]


def test_the_profile_is_known_once_it_has_been_planned_with():
    run = Run()
    run.steps(2)
    assert run.replanner.profile is None
    run.steps(1)
    assert run.replanner.profile is run.reports[0].prediction.profile


def test_memory_is_measured_in_the_window_alone():
    run = Run()
    assert [run.replanner.measures_memory(step) for step in (1, 2, 3, 4)] == [False, True, True, False]
    run.steps(3)
    assert not run.replanner.measures_memory(3)


def test_no_rank_plans_a_schedule_of_its_own_before_the_profile_is_complete(monkeypatch: pytest.MonkeyPatch):
    """One rank plans for all; a schedule that another rank planned would never run."""
    run = Run()
    monkeypatch.setattr(RunSchedules, "schedule", None)
    for step in (1, 2):
        assert run.replanner.before_step(2) is None
        assert run.replanner.after_step(step, 2) is None


def test_a_given_profile_is_planned_with_before_the_first_step():
    run = Run(profile=GIVEN)
    assert run.replanner.profile is None
    run.steps(6)
    assert run.new_plans == [1]
    (report,) = run.reports
    assert (report.step, report.prediction.profile) == (0, GIVEN)
    assert run.edges_measured_at == [], "nothing is measured"
    assert not run.replanner.measures_memory(2)


def test_a_plan_that_does_not_adapt_is_kept_and_only_predicted():
    run = Run(RunSchedules.named("1f1b", 1))
    run.steps(6, (3.0, 2.0, 1.0))
    assert run.new_plans == []
    (report,) = run.reports
    assert not report.is_new_plan
    assert report.prediction.schedule.name == "1f1b"
    costs = report.prediction.profile.costs
    assert costs.work(0) == pytest.approx(6.0)
    assert costs.time_b == costs.time_w, "a fused backward tells no more"


def test_each_number_of_microbatches_is_planned_once():
    """`--rampup-batch-size`: the limit, a multiple of 1F1B's peak, grows with the number until the pipeline is full."""
    run = Run(profile=GIVEN, memory_limit=MemoryLimit(multiple=1.0))
    for m in (1, 1, 2, 2, 3):
        run.steps(1, m=m)
    assert run.new_plans == [1, 3, 5]
    assert [report.prediction.schedule.num_microbatches for report in run.reports] == [1, 2, 3]
    assert run.plan.shared.keys() == {1, 2, 3}, "costs and limits are equal, so that earlier schedules stay"


def test_a_step_of_fewer_microbatches_leaves_the_memory_of_larger_steps_as_it_is():
    kept = replace(GIVEN, costs=StageCosts.uniform(1, 5, 5, 5, 0, 100, -50, -40))
    run = Run(profile=kept, memory_limit=MemoryLimit(multiple=1.0))
    for m in (4, 2, 4, 2):
        run.steps(1, m=m)
    assert [report.memory_limit for report in run.reports] == [(130.0,), (130.0,)]


def test_numbers_of_microbatches_before_the_window_ends_need_no_plan():
    run = Run()
    run.steps(1, m=1)
    run.steps(2, m=2)
    run.steps(1, m=3)
    assert run.new_plans == [4, 4]  # after the window for 2, and at once again for 3
    assert run.plan.schedule(3).num_microbatches == 3


@pytest.mark.parametrize(("limit", "in_bytes"), [(MemoryLimit(multiple=1.5), 150.0), (MemoryLimit(num_bytes=700), 700)])
def test_the_memory_limit_is_turned_into_bytes(limit, in_bytes):
    run = Run(profile=GIVEN, memory_limit=limit)
    run.steps(1)
    assert run.reports[0].memory_limit == (in_bytes,)
    assert max(run.reports[0].prediction.peak_bytes) <= in_bytes


@pytest.mark.parametrize(("limit", "room"), [(MemoryLimit(multiple=1.5), 165.0), (MemoryLimit(num_bytes=700), 670.0)])
def test_every_limit_includes_what_an_operation_needs_inside(limit, room):
    """The peak of 1F1B includes memory inside operations: a limit of 1.5 is 1.5 times 100 and 30 bytes."""
    run = Run(profile=replace(GIVEN, inside=(30.0,)), memory_limit=limit)
    run.steps(1)
    assert run.reports[0].memory_limit == (room,)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (MemoryLimit(num_bytes=99), "limit of 99 bytes: the smallest that works is 100B"),
        (
            MemoryLimit(multiple=0.3),
            "limit of 30 bytes: the smallest that works is 100B, or 1 times 1F1B's peak",
        ),
    ],
)
def test_a_limit_that_nothing_fits_under_is_an_error_that_names_the_smallest(limit, message):
    run = Run(profile=GIVEN, memory_limit=limit)
    with pytest.raises(ScheduleError, match=f"{message}$"):
        run.steps(1)


@pytest.mark.parametrize(("inside", "room"), [((), 450.0), ((130.0,), 320.0)])
def test_auto_takes_what_is_free_less_what_an_operation_needs_inside(monkeypatch, inside, room):
    monkeypatch.setattr(replanner, "least_free_bytes", lambda device: 500)
    run = Run(profile=replace(GIVEN, inside=inside), memory_limit=MemoryLimit())
    run.steps(2, m=8)
    assert run.new_plans == [2], "the optimizer allocates its states in the first step"
    assert run.reports[0].memory_limit == (room,)
    assert run.reports[0].prediction.peak_bytes[0] <= room


def test_auto_where_an_operation_leaves_no_room_names_what_works(monkeypatch):
    monkeypatch.setattr(replanner, "least_free_bytes", lambda device: 500)
    run = Run(profile=replace(GIVEN, inside=(480.0,)), memory_limit=MemoryLimit())
    with pytest.raises(ScheduleError, match=r"limit of 450 bytes: the smallest that works is 580B$"):
        run.steps(2)


def test_a_limit_keeps_room_for_what_an_operation_needs_inside():
    assert limits_of_ranks((555, 600), (200.0, 8.0)) == (355.0, 592.0)
    assert limits_of_ranks((150, 150), (200.0, 8.0)) == (1.0, 142.0), "no room on the first rank"


RECOMPUTED = RunSchedules.named("1f1b", 1).requesting(recomputes=(Recompute.FULL,))


def test_on_gpus_a_rank_whose_states_take_less_may_have_more_activations(monkeypatch):
    """No rank needs more for states and activations than the rank that needs most under 1F1B."""
    assert beside_states((100.0, 40.0), (10.0, 30.0)) == (100.0, 80.0)
    monkeypatch.setattr(replanner, "states_of_ranks", lambda device, rank, num_ranks: (7.0,) * num_ranks)
    run = Run(profile=GIVEN, memory_limit=MemoryLimit(multiple=1.5))
    run.steps(1)
    assert run.reports[0].memory_limit == (150.0,)


@pytest.mark.parametrize(("given", "limit"), [("1.2", 150.0), (None, 150.0), ("150B", 120.0)])
def test_only_limits_in_bytes_of_a_chosen_layout_include_temporary_memory(given, limit):
    """A multiple compares activations with megatron-core's, whose operations need temporary memory, too."""
    memory_limit = None if given is None else MemoryLimit.parse(given)
    run = Run(profile=replace(GIVEN, inside=(30.0,)), memory_limit=memory_limit, limits=(150.0,))
    run.steps(1)
    assert run.reports[0].memory_limit == (limit,)


def test_while_costs_are_measured_every_stage_recomputes_and_then_no_more_than_is_planned():
    """The only stage is the last one: its backwards follow their F's at once, so that the plan keeps everything."""
    run = Run(RECOMPUTED)
    plan = RECOMPUTED.schedule(2)
    assert not plan.recomputes
    assert [str(op) for op in run.replanner.to_measure(plan).ops[0]] == ["F0", "R0", "BW0", "F1", "BW1"]
    run.steps(3)
    assert run.new_plans == [4], "so that the run goes on with the plan's own schedule"
    assert run.replanner.to_measure(plan) is plan
    keeps_all = Run(RunSchedules.named("1f1b", 1))
    assert keeps_all.replanner.to_measure(plan) is plan


def test_while_costs_are_measured_operations_run_alone_and_in_pairs():
    run = Run(RunSchedules.named("dualpipe-v", 1))
    plan = run.plan.schedule(2)
    assert not plan.kinds.isdisjoint(PAIRED)
    assert run.replanner.to_measure(plan).kinds == {OpKind.F, OpKind.B, OpKind.BW, OpKind.W, OpKind.PBW}
    run.steps(3)
    assert run.new_plans == [4], "so that the run goes on with the plan's own schedule"
    assert run.replanner.to_measure(plan) is plan


def test_all_ranks_get_the_schedule_that_the_first_one_makes():
    plan = RunSchedules.named("zb-h1", 2)
    shared = plan_on_first_rank(plan, 4)
    assert (shared, 4 in shared.shared, 8 in shared.shared, 4 in plan.shared) == (plan, True, False, False)
    assert shared.schedule(4) == plan.schedule(4)
    assert plan_on_first_rank(shared, 8).schedule(4) is shared.schedule(4)


def test_what_the_first_rank_cannot_plan_is_everyones_error():
    with pytest.raises(ScheduleError, match="is for 4 microbatches, not for 8"):
        plan_on_first_rank(RunSchedules.of(generate("zb-h1", 2, 4)), 8)
