"""Plans the schedule of a run from measured costs, and plans again if later measurements differ from these costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megatron.zero_bubble.planner.expected_time import expected_time
from megatron.zero_bubble.planner.memory_limit import beside_states, beyond_limit
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.device import MARGIN, least_free_bytes, limits_of_ranks, states_of_ranks
from megatron.zero_bubble.runtime.joint import plan_on_first_rank
from megatron.zero_bubble.runtime.measured_variant import measured_variant
from megatron.zero_bubble.runtime.order_trial import SMALL_GAIN, WORTHWHILE, OrderTrial, TrialResult, own_order
from megatron.zero_bubble.runtime.plan_check import (
    SPAN_TOLERANCE,
    differences,
    largest_change,
    with_measured_span,
    with_measured_times,
)
from megatron.zero_bubble.runtime.plan_report import PlanningOptions, Report
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.runtime.run_costs import RunCosts
from megatron.zero_bubble.schedule import Infeasible, Schedule, simulate
from megatron.zero_bubble.schedule.costs import MESSAGE_COSTS
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.kinds import PAIRED
from megatron.zero_bubble.schedule.recomputation import Recompute

_DRIFT_STEPS = 20
"""Number of steps between two checks for drift; a check compares times of operations with times measured earlier."""
CHECK_AFTER = 8
"""Number of steps after which a plan made from measured costs is compared with the measured times of these steps."""
_UNSETTLED = 2
"""Number of steps at the start of a new plan that are left out when the plan is compared with measured times."""


class Replanner:
    """Decides, before and after each training step, whether a new plan replaces the current plan of a run.

    Args:
        plan: the first plan of the run. If the schedules of `plan` depend on costs, a plan from measured costs later
            replaces `plan`.
        measured: the measured costs of the run.
        report: called on every rank with each decision.
        device: this rank's device, whose free memory is measured if the memory limit is `auto`.
    """

    def __init__(
        self,
        plan: RunSchedules,
        options: PlanningOptions,
        measured: RunCosts,
        report: Callable[[Report], None],
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._options = options
        self._measured = measured
        self._report = report
        self._device = device
        self._profile = options.profile
        self._first_costs = None if options.profile is None else options.profile.costs_without_waits
        """The costs before any correction; None before the first profile. Messages were measured without other load."""
        self.megatrons = options.megatrons
        self._step = 0
        self._check_at = 0
        """Number of the step after which the plan is compared with measured steps; 0 for never."""
        self._checked: list[Sequence[MeasuredOp]] = []
        """This rank's measured operations of each step that is compared with the plan."""
        self._checked_numbers: set[int] = set()
        """The different numbers of microbatches in the measured steps that are compared with the plan."""
        self._current = plan
        """The last plan that was chosen from measured costs, or the first plan; a trial in progress does not count."""
        self._planned_for: set[int] = set()
        """The numbers of microbatches for which a plan was made from the current profile."""
        self._largest_number = 0
        """The largest number of microbatches planned for; a memory limit is a multiple of 1F1B's memory with it."""
        self._lacks_states = options.needs_free_memory
        """Whether the free memory is yet to be measured after a step, in which the optimizer allocates its states."""
        self._groups: dict[int, tuple[int, ...]] = {}
        """Number of microbatches -> `Schedule.groups` of the schedule that runs."""
        self._trial: OrderTrial | None = None
        measured.observer.sinks.append(self._collect)

    @property
    def profile(self) -> Profile | None:
        """The latest measured costs; None before a plan is made from measured costs."""
        return self._profile if self._planned_for else None

    def let_microbatches_differ(self) -> None:
        """Adapt to microbatches of different sizes: plan from mean costs, and never try megatron-core's own order."""
        self._measured.center = statistics.fmean
        self._options = replace(self._options, tries_own_order=False)

    def share(self, plan: RunSchedules) -> None:
        """Take over the schedules in `plan`, the plan that runs, for further numbers of microbatches."""
        if plan.request == self._current.request:
            self._current = plan

    def measures_memory(self, step: int) -> bool:
        return self._profile is None and self._options.first_step <= step <= self._options.last_step

    def to_measure(self, schedule: Schedule) -> Schedule:
        """Return a variant of `schedule` for measuring all costs, or `schedule` itself if nothing is to be measured."""
        self._groups[schedule.num_microbatches] = schedule.groups
        measures = self._profile is None and self._options.has_costs
        return measured_variant(schedule, self._plan) if measures else schedule

    def before_step(self, num_microbatches: int) -> RunSchedules | None:
        """Return a plan from a profile that was not used for `num_microbatches` yet, or None if the run keeps its plan.

        `before_step` is a collective call. Each number of microbatches needs its own plan, because a larger number may
        raise the memory limit. If the user gives a profile, the plan for the first step is made from this profile.
        """
        if self._profile is None or num_microbatches in self._planned_for or self._lacks_states:
            return None
        if self._trial is not None:  # the trial ends without a result
            self._trial, self._check_at = None, 0
            self._checked.clear()
        return self._decide(num_microbatches)

    def after_step(self, step: int, num_microbatches: int) -> RunSchedules | None:
        """Return a new plan for the next steps, or None if the run keeps its plan; a collective call."""
        options, self._lacks_states = self._options, False
        if self._profile is None and step == options.last_step:
            self._measured.measure_messages()
            self._profile = self._measure(num_microbatches)
            self._first_costs = self._profile.costs
            self._step, self._check_at = step, step + CHECK_AFTER
            return self._decide(num_microbatches)
        if self._profile is None:
            return None
        if self._current.schedule(num_microbatches).has_pairs:
            return None  # a forward and a backward that run as a pair are not measured separately
        if self._is_checked(step):
            self._checked_numbers.add(num_microbatches)
        if step == self._check_at:
            if self._trial is not None:
                return self._continue_trial(self._trial)
            if self._checked_numbers == {num_microbatches}:
                new, span = self._corrected(self._measured.add_checked(self._checked), num_microbatches)
                return self._begin_trial(span, num_microbatches) or new
        if self._trial is None and options.threshold > 0 and step % _DRIFT_STEPS == 0:
            return self._look_for_drift(step, num_microbatches)
        return None

    def _collect(self, step: int, ops: Sequence[MeasuredOp]) -> None:
        """Keep the operations of a step that is measured for a profile or for a comparison with the plan."""
        if self.measures_memory(step):
            self._measured.add(ops)
        elif any(measured.op.kind in PAIRED for measured in ops):
            return  # pairs are not compared with the plan
        elif self._is_checked(step):
            self._checked.append(ops)
        elif self._profile is not None and self._options.threshold > 0:
            self._measured.add(ops)

    def _is_checked(self, step: int) -> bool:
        return self._check_at - CHECK_AFTER + _UNSETTLED < step <= self._check_at

    def _measure(self, num_microbatches: int, center: Callable[[Sequence[float]], float] | None = None) -> Profile:
        """Make a profile from the steps measured since the last profile; a collective call."""
        return self._measured.profile(self._options.model, self._groups.get(num_microbatches, ()), center)

    def _decide(self, num_microbatches: int) -> RunSchedules | None:
        """Make and report a plan from the current profile; return the plan, or None if the run keeps its plan."""
        plan, limit = self._planned(num_microbatches)
        self._current = plan
        self._planned_for.add(num_microbatches)
        schedule = plan.schedule(num_microbatches)
        ratio = self._measured.ratio_of_pairs
        self._report(Report(self.predict(schedule), self._plan.adapts, limit, self._step, ratio_of_pairs=ratio))
        # A plan that does not adapt continues, but without the variant of its schedule that measured the costs.
        is_paired = schedule.has_pairs
        measured_another = is_paired or self._plan.recompute is not Recompute.NONE or self._plan.offloads
        return plan if self._plan.adapts or measured_another else None

    def _planned(self, num_microbatches: int) -> tuple[RunSchedules, tuple[float, ...] | None]:
        """Make a plan from the current profile, in a collective call; return the plan and the ranks' memory limits."""
        profile, plan = self._known_profile(), self._plan
        self._largest_number = max(self._largest_number, num_microbatches)
        in_bytes = self._limits_in_bytes(profile, self._largest_number)
        inside = profile.inside_ranks if self._options.limit_includes_inside else (0.0,) * plan.placement.num_ranks
        limit = None if in_bytes is None else limits_of_ranks(in_bytes, inside)
        if plan.adapts:
            plan = plan.requesting(costs=profile.costs, memory_limit=limit, spread=profile.noise)
            plan = self._current if plan.request == self._current.request else plan
        try:
            return plan_on_first_rank(plan, num_microbatches), limit
        except Infeasible as error:
            if in_bytes is None:  # the schedule's own limit
                raise
            smallest = math.ceil(error.smallest_limit + max(inside))
            raise beyond_limit(plan.name, min(in_bytes), smallest, self._options.memory_limit) from error

    def _known_profile(self) -> Profile:
        assert self._profile is not None
        return self._profile

    def _corrected(self, span: float, num_microbatches: int) -> tuple[RunSchedules | None, float]:
        """Correct the costs with measured times, and plan again from the corrected costs.

        The result is a tuple: the new plan (None if the run keeps its plan), and the expected duration of a later step
        in milliseconds.
        """
        old, running = self._known_profile(), self._current.schedule(num_microbatches)
        measured = self._measure(num_microbatches, statistics.fmean)
        costs = with_measured_times(old.costs, measured.costs, running)
        if span > simulate(running, costs).cost * (1 + SPAN_TOLERANCE):
            costs = with_measured_span(costs, running, span)
        changes = tuple(differences(old.costs, costs))
        if not changes:
            return None, span
        self._profile, self._step = replace(old, costs=costs, noise=measured.noise), self._check_at
        plan, limit = self._planned(num_microbatches)
        self._planned_for = {num_microbatches}
        before, after = (
            expected_time(plan.request, simulate(schedule, costs))
            for schedule in (running, plan.schedule(num_microbatches))
        )
        is_new = self._plan.adapts and before > after * WORTHWHILE
        if is_new:
            self._current = plan
        prediction = self.predict(self._current.schedule(num_microbatches))
        self._report(Report(prediction, is_new, limit, self._step, changes))
        return (plan, span * after / before) if is_new else (None, span)

    def _begin_trial(self, span: float, num_microbatches: int) -> RunSchedules | None:
        """Begin a trial of megatron-core's own order and return its schedules, or return None if no trial begins."""
        planned = self._current
        if not self._options.tries_own_order or not planned.adapts or self._options.megatrons is not None:
            return None
        gain = self.predict(planned.schedule(num_microbatches)).gain.times
        own = own_order(planned, num_microbatches) if gain < SMALL_GAIN else None
        if own is None:
            return None
        self._trial = OrderTrial(num_microbatches, own, planned, span)
        self._check_at += CHECK_AFTER
        self._checked_numbers.clear()
        return own

    def _continue_trial(self, trial: OrderTrial) -> RunSchedules | None:
        """Continue or end a trial; return the schedules of the next steps, or None to keep the order of operations.

        `_continue_trial` is a collective call.
        """
        if self._checked_numbers != {trial.num_microbatches}:
            self._trial = None
            self._checked.clear()
            return trial.planned
        span = self._measured.add_checked(self._checked)
        measured = self._measure(trial.num_microbatches, statistics.fmean)  # later profiles begin anew
        if trial.baseline_span is not None:
            planned_span = (trial.span_before + span) / 2
            return self._end_trial(trial, TrialResult(trial.baseline.name, trial.baseline_span, planned_span))
        self._trial = replace(trial, baseline_span=span, baseline_costs=measured.costs)
        self._check_at += CHECK_AFTER
        self._checked_numbers.clear()
        return trial.planned

    def _end_trial(self, trial: OrderTrial, result: TrialResult) -> RunSchedules | None:
        old, self._trial, self._step = self._known_profile(), None, self._check_at
        if not result.keeps_planned:
            assert trial.baseline_costs is not None
            baseline = trial.baseline.schedule(trial.num_microbatches)
            self._profile = replace(old, costs=with_measured_times(old.costs, trial.baseline_costs, baseline))
            self._first_costs = self._profile.costs  # the order that runs is the baseline: equal waits
            self._plan = self._current = trial.baseline
        prediction = self.predict(self._current.schedule(trial.num_microbatches))
        if result.keeps_planned:
            self.megatrons = result.megatrons_time(prediction.time, old.costs)
            prediction = replace(prediction, megatrons=self.megatrons)
        self._report(Report(prediction, result.keeps_planned, None, self._step, trial=result))
        return None if result.keeps_planned else trial.baseline

    def predict(self, schedule: Schedule) -> Prediction:
        """Predict the time and the memory of a schedule from the current profile."""
        profile, first = self._known_profile(), self._first_costs
        assert first is not None
        return Prediction(
            profile,
            schedule,
            self._plan.recompute,
            self.megatrons,
            interlocks=self._plan.request.post_validation,
            # Corrections add this order's waits to the times of messages, but 1F1B may wait less or more.
            baseline_costs=replace(profile.costs, **{name: getattr(first, name) for name in MESSAGE_COSTS}),
        )

    def _look_for_drift(self, step: int, num_microbatches: int) -> RunSchedules | None:
        """Measure the times of operations again; plan again if the times have changed by more than the threshold."""
        old, new = self._known_profile(), self._measure(num_microbatches)
        # Memory and messages do not drift and are measured only once.
        costs = with_measured_times(old.costs, new.costs, self._current.schedule(num_microbatches))
        if largest_change(old.costs, costs) <= self._options.threshold:
            return None
        self._profile, self._step = replace(old, costs=costs, noise=new.noise), step
        self._planned_for = set()
        return self._decide(num_microbatches)

    def _limits_in_bytes(self, profile: Profile, num_microbatches: int) -> tuple[float, ...] | None:
        """Return the memory limit of each rank in bytes; None if the schedule determines its own limit."""
        limit = self._options.memory_limit
        if self._options.limits is not None or limit is None:
            return self._options.limits
        free = int(MARGIN * least_free_bytes(self._device)) if limit.is_auto else None
        of_ranks = limit.of_ranks(
            profile.placement, profile.costs, num_microbatches, free, profile.inside_ranks, self._plan.recompute
        )
        states = states_of_ranks(self._device, self._measured.rank, len(of_ranks)) if limit.multiple else None
        return beside_states(of_ranks, states or (0.0,) * len(of_ranks))
