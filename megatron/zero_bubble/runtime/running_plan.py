"""Holds the current plan of a run, and an executor for each of the plan's schedules."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from megatron.zero_bubble.planner.fused_backwards import with_separate_backwards
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.planner.run_schedules import RunSchedules, prepare
from megatron.zero_bubble.runtime.executor import Executor
from megatron.zero_bubble.runtime.joint import plan_on_first_rank
from megatron.zero_bubble.runtime.replanner import Replanner
from megatron.zero_bubble.schedule import OpKind, Schedule, ScheduleError
from megatron.zero_bubble.schedule.formats import Profile


class MakeExecutor(Protocol):
    """Makes this rank's executor of a schedule, for a pipeline whose ranks are `group`."""

    def __call__(self, schedule: Schedule, group: dist.ProcessGroup, *, tail_by_parameter: bool) -> Executor: ...


class RunningPlan:
    """Holds the plan of a run, which may change between two steps, and the executors of the plan's schedules.

    Args:
        plan: the first plan of the run.
        replanner: chooses later plans.
        post_validation: whether the schedules contain the optimizer's steps (STEP and VALIDATE).
    """

    def __init__(
        self, plan: RunSchedules, replanner: Replanner, make_executor: MakeExecutor, *, post_validation: bool
    ) -> None:
        self.plan = plan
        self.replanner = replanner
        self._make_executor = make_executor
        self._post_validation = post_validation
        self._next_plan: RunSchedules | None = None
        self._executors: dict[tuple[int, bool, int], Executor] = {}
        """(number of microbatches, whether only forwards run, `StepDecision.level`) -> executor."""
        self._levels: dict[int, int] = {}
        """Number of microbatches -> `StepDecision.level` of the last training step with that many microbatches."""
        self._predictions: dict[tuple[int, int], Prediction] = {}

    @property
    def profile(self) -> Profile | None:
        """The latest measured costs; None before a plan is made from measured costs."""
        return self.replanner.profile

    def before_step(self, num_microbatches: int) -> None:
        """Replace the current plan if the replanner has chosen a new plan; a collective call before a training step.

        A plan chosen after a step takes effect only before the next step, because reports between the steps describe
        the last step.
        """
        next_plan = self.replanner.before_step(num_microbatches) or self._next_plan
        if next_plan is not None:
            assert next_plan.placement == self.plan.placement, "a new plan must keep the placement of stages"
            self.plan, self._next_plan = next_plan, None
            self._predictions = {}
            self.drop_executors()

    def after_step(self, step: int, num_microbatches: int) -> None:
        """Let the replanner choose the next plan; a collective call after every training step."""
        self._next_plan = self.replanner.after_step(step, num_microbatches)

    def executor(
        self,
        group: dist.ProcessGroup,
        num_microbatches: int,
        *,
        forward_only: bool,
        overlaps_reduction: bool,
        mixes_backwards: bool = True,
        less_memory: tuple[int, Schedule] | None = None,
    ) -> Executor:
        """Return the executor of a training step or an evaluation; creating an executor is a collective call.

        Args:
            mixes_backwards: whether a step may have both fused and separate backwards. FSDP keeps one sum of gradients
                for fused backwards and another sum for separate backwards, and adding the two sums would change a
                gradient's last bits.
            less_memory: `StepDecision.level` and `StepDecision.schedule` for a step whose microbatches do not fit in
                memory with the run's own schedule; None for any other step.
        """
        level = less_memory[0] if less_memory else 0
        key = (num_microbatches, forward_only, level)
        if not forward_only:
            self._levels[num_microbatches] = level
        if key not in self._executors:
            planned = less_memory[1] if less_memory else self._planned(num_microbatches, forward_only=forward_only)
            if not mixes_backwards and planned.kinds >= {OpKind.BW, OpKind.W}:
                planned = with_separate_backwards(planned)
            schedule = prepare(
                planned,
                self.profile.costs if self.profile is not None else self.plan.costs,
                forward_only=forward_only,
                orders_tail=overlaps_reduction,
                post_validation=self._post_validation,
            )
            self._executors[key] = self._make_executor(schedule, group, tail_by_parameter=overlaps_reduction)
        return self._executors[key]

    def _planned(self, num_microbatches: int, *, forward_only: bool) -> Schedule:
        """Return the plan's schedule for a number of microbatches; a collective call.

        Raises:
            ScheduleError: the plan has no schedule for this number of microbatches, which are to be trained.
        """
        if num_microbatches not in self.plan.shared:
            try:
                self.plan = plan_on_first_rank(self.plan, num_microbatches)
                self.replanner.share(self.plan)
            except ScheduleError:
                if not forward_only:
                    raise
                return self.plan.for_evaluation(num_microbatches)
        return self.replanner.to_measure(self.plan.schedule(num_microbatches))

    def drop_executors(self) -> None:
        """Drop all executors, which refer to the connections between ranks."""
        self._executors = {}

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule of the last training step with `num_microbatches` microbatches."""
        return self._executors[num_microbatches, False, self._levels[num_microbatches]].schedule

    def prediction(self, num_microbatches: int) -> Prediction | None:
        """Predict the time and the memory of the current schedule; None if the plan was made without measured costs."""
        if self.profile is None:
            return None
        key = num_microbatches, self._levels[num_microbatches]
        prediction = self._predictions.get(key)
        changed = prediction is not None and prediction.megatrons != self.replanner.megatrons
        if prediction is None or changed or prediction.profile is not self.profile:
            prediction = self._predictions[key] = self.replanner.predict(self.schedule(num_microbatches))
        return prediction
