"""A run of one emulated rank, for the tests of the `Replanner`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from toy_pipeline import FakeClock

from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.plan_report import PlanningOptions, Report
from megatron.zero_bubble.runtime.replanner import Replanner
from megatron.zero_bubble.runtime.run_costs import RunCosts
from megatron.zero_bubble.schedule import OpKind, Placement, StageCosts
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.pairs import apart

MODEL = {"num_layers": 4}
GIVEN = Profile(Placement("linear", 1), StageCosts.uniform(1, 5, 5, 5, 0, 100, -50, -50), 0.0, MODEL)


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
