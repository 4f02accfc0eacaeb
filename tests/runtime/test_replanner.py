"""When a run plans: after its window, before the first step from a given profile, when times prove wrong or drift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from toy_pipeline import FakeClock

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.memory_limit import MemoryLimit
from megatron.zero_bubble.planner.prediction import MegatronsTime
from megatron.zero_bubble.planner.run_schedules import RunSchedules, prepare
from megatron.zero_bubble.runtime import replanner
from megatron.zero_bubble.runtime.device import limits_of_ranks
from megatron.zero_bubble.runtime.joint import plan_on_first_rank
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.plan_report import PlanningOptions, Report
from megatron.zero_bubble.runtime.replanner import Replanner
from megatron.zero_bubble.runtime.run_costs import RunCosts
from megatron.zero_bubble.schedule import OpKind, Placement, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.pairs import PAIRED, apart
from megatron.zero_bubble.schedule.recomputation import Recompute, with_recomputation_everywhere

MODEL = {"num_layers": 4}
GIVEN = Profile(Placement("linear", 1), StageCosts.uniform(1, 5, 5, 5, 0, 100, -50, -50), 0.0, MODEL)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """A pipeline of one rank, whose operations take as many milliseconds as the test says."""

    def __init__(self, plan: RunSchedules | None = None, **options) -> None:
        self.clock = FakeClock()
        self.observer = StepObserver(self.clock)
        self.plan: RunSchedules = plan or RunSchedules.named("auto", 1)
        self.reports: list[Report] = []
        self.edges_measured_at: list[int] = []
        self.step = 0
        self.fused = 1.0
        """Time of a backward that computes both gradients, divided by the time of B and W."""
        self.new_plans: list[int] = []
        """The steps that the first rank began with a new plan."""
        self.replanner = Replanner(
            self.plan,
            PlanningOptions(**{"first_step": 2, "last_step": 3, "model": MODEL, **options}),
            RunCosts(self.plan.placement, 0, self.observer, self._measure_messages),
            self.reports.append,
            torch.device("cpu"),
        )

    def _measure_messages(self) -> tuple[dict[int, float], float]:
        self.edges_measured_at.append(self.step)
        return {}, 0.0

    def steps(self, count: int, milliseconds: Sequence[float] = (1.0, 1.0, 1.0), m: int = 2) -> None:
        kinds = (OpKind.F, OpKind.B, OpKind.W, OpKind.R)[: len(milliseconds)]
        for _ in range(count):
            self._go_on_with(self.replanner.before_step(m), self.step + 1)
            self.step += 1
            self._run(dict(zip(kinds, milliseconds, strict=True)), m)
            self._go_on_with(self.replanner.after_step(self.step, m), self.step + 1)

    def _run(self, times: dict[OpKind, float], m: int) -> None:
        times[OpKind.BW] = self.fused * (times[OpKind.B] + times[OpKind.W])
        recorder = self.observer.start(self.step)
        for op in apart(self.plan.schedule(m)).compute_ops(0):
            recorder.begin(op)
            self.clock.now += times[op.kind] / 1000
            recorder.end(op)
        self.observer.stop()

    def _go_on_with(self, plan: RunSchedules | None, step: int) -> None:
        if plan is not None:
            self.plan = plan
            self.new_plans.append(step)


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
        (MemoryLimit(num_bytes=99), "limit of 99 bytes: the smallest that works is 100"),
        (
            MemoryLimit(multiple=0.3),
            "limit of 30 bytes: the smallest that works is 100, or 1 times 1F1B's peak",
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
    run.steps(1, m=8)
    assert run.reports[0].memory_limit == (room,)
    assert run.reports[0].prediction.peak_bytes[0] <= room


def test_auto_where_an_operation_leaves_no_room_names_what_works(monkeypatch):
    monkeypatch.setattr(replanner, "least_free_bytes", lambda device: 500)
    run = Run(profile=replace(GIVEN, inside=(480.0,)), memory_limit=MemoryLimit())
    with pytest.raises(ScheduleError, match=r"limit of 450 bytes: the smallest that works is 580$"):
        run.steps(1)


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


def test_a_plan_that_the_steps_confirm_is_not_mentioned_again():
    run = Run()
    run.steps(3)
    run.steps(30, (1.04, 1.04, 1.04))
    assert (run.new_plans, len(run.reports)) == ([4], 1)


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
    assert (report.trial.own_name, report.step) == ("1f1b", 27)
    assert report.trial.planned_span == pytest.approx(6.0)
    assert report.trial.own_span == pytest.approx(2 * (1 + 2 * fused))
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
    assert trial.planned_span == pytest.approx(trial.own_span)


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


def test_a_limit_keeps_room_for_what_an_operation_needs_inside():
    assert limits_of_ranks((555, 600), (200.0, 8.0)) == (355.0, 592.0)
    assert limits_of_ranks((150, 150), (200.0, 8.0)) == (1.0, 142.0), "no room on the first rank"


RECOMPUTED = RunSchedules.named("1f1b", 1).requesting(recomputes=(Recompute.FULL,))


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


def test_all_ranks_get_the_schedule_that_the_first_one_makes():
    plan = RunSchedules.named("zb-h1", 2)
    shared = plan_on_first_rank(plan, 4)
    assert (shared, 4 in shared.shared, 8 in shared.shared, 4 in plan.shared) == (plan, True, False, False)
    assert shared.schedule(4) == plan.schedule(4)
    assert plan_on_first_rank(shared, 8).schedule(4) is shared.schedule(4)


def test_what_the_first_rank_cannot_plan_is_everyones_error():
    with pytest.raises(ScheduleError, match="is for 4 microbatches, not for 8"):
        plan_on_first_rank(RunSchedules.of(generate("zb-h1", 2, 4)), 8)
