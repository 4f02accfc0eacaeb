"""Simulates a schedule and computes the figures that `simulate`, `compare` and `memory-curve` print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.zero_bubble.cli.schedule.rank_costs import stage_costs
from megatron.zero_bubble.cli.shared_flags import CostFlags
from megatron.zero_bubble.schedule import (
    HardwareQueues,
    Op,
    Schedule,
    ScheduleError,
    Timeline,
    bubbles,
    critical_path,
    iteration_time,
    lower,
    repeat,
    simulate,
    validate,
    with_post_validation,
)
from megatron.zero_bubble.schedule.host_link import host_memory, num_offloaded
from megatron.zero_bubble.schedule.ir import check_size
from megatron.zero_bubble.schedule.kinds import SENDS
from megatron.zero_bubble.schedule.recomputation import (
    num_recomputed,
    with_recomputation,
    without_recomputation,
)
from megatron.zero_bubble.schedule.step_ops import operation_name, without_post_validation


@dataclass(frozen=True)
class ScheduleFigures:
    """A valid schedule and the results of its simulation; memory is in M_B."""

    schedule: Schedule
    """The schedule of one iteration."""
    timeline: Timeline
    """The simulation of `steps` iterations."""
    steps: int
    iteration_time: float
    """Time from one iteration to the next."""
    without_post_validation: float
    """Time from one iteration to the next if each waits for the last rank of the one before."""
    lower_bound: float
    generation_seconds: float
    cost_in_backward: float | None
    """The cost if every backward recomputes, as in megatron-core; None unless everything is recomputed."""

    @property
    def gain(self) -> float:
        """Fraction by which post-validation makes iterations faster."""
        return float(self.without_post_validation / self.iteration_time - 1)

    @property
    def lost(self) -> float:
        """Fraction of the cost that is not F, B and W of the busiest rank: the bubble, and R."""
        costs, placement = self.timeline.costs, self.schedule.placement
        works = (sum(costs.work(stage) for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks))
        return float(1 - self.steps * self.schedule.num_microbatches * max(works) / self.timeline.cost)

    @property
    def recomputed(self) -> float:
        """Fraction of the microbatches on all stages that have an R."""
        return num_recomputed(self.schedule) / (self.schedule.num_stages * self.schedule.num_microbatches)

    @property
    def offloaded(self) -> float:
        """Fraction of the microbatches on all stages that are copied to the host and back."""
        return num_offloaded(self.schedule) / (self.schedule.num_stages * self.schedule.num_microbatches)

    @property
    def host_memory(self) -> list[float]:
        """Peak memory on the host of every rank, in M_B."""
        return [float(peak) for peak in host_memory(self.schedule, self.timeline.costs)]

    @property
    def above_bound(self) -> float:
        """Fraction by which the cost exceeds the lower bound."""
        return float(self.timeline.cost / self.lower_bound - 1) if self.lower_bound else 0.0

    @property
    def peak_memory(self) -> list[float]:
        """Peak memory of every rank, in M_B."""
        return [float(peak) for peak in self.timeline.peak_memory]

    @property
    def num_messages(self) -> int:
        """Number of tensors that cross ranks in one iteration."""
        return sum(op.kind in SENDS for ops in lower(self.schedule).ops for op in ops)

    def as_json(self) -> dict[str, Any]:
        timeline, schedule = self.timeline, self.schedule
        return {
            "schedule": schedule.name,
            "pipeline_size": schedule.num_ranks,
            "num_microbatches": schedule.num_microbatches,
            "num_chunks": schedule.num_chunks,
            "placement": schedule.placement.kind,
            "cost": timeline.cost,
            "makespan": timeline.makespan,
            **timeline.idle.as_json(),
            "recomputed": self.recomputed,
            "lost": self.lost,
            "offloaded": self.offloaded,
            "host_memory": self.host_memory,
            "cost_in_backward": self.cost_in_backward,
            "lower_bound": self.lower_bound,
            "peak_memory": self.peak_memory,
            "peak_memory_op": [self._name(peak.op) for peak in timeline.peaks],
            "span": list(timeline.spans),
            "bubble": [asdict(bubble) for bubble in bubbles(timeline)],
            "critical_path": [f"{rank}:{self._name(timed.op)}" for rank, timed in critical_path(timeline)],
            "num_messages": self.num_messages,
            "overlap_communication": timeline.overlap_communication,
            "hardware_queues": timeline.hardware_queues and timeline.hardware_queues.value,
            "post_validation": schedule.has_post_validation,
            "steps": self.steps,
            "iteration_time": self.iteration_time,
            "iteration_time_without_post_validation": self.without_post_validation,
            "generation_seconds": self.generation_seconds,
        }

    def _name(self, op: Op | None) -> str | None:
        return None if op is None else operation_name(op, self.schedule.num_microbatches, self.steps)


def simulated_figures(
    flags: CostFlags,
    schedule: Schedule,
    generation_seconds: float,
    *,
    post_validation: bool = False,
    steps: int = 1,
    queues: HardwareQueues | None = None,
    lengths: Sequence[float] = (),
) -> ScheduleFigures:
    """Validate `schedule`, with post-validation if asked for, and simulate `steps` successive iterations of it.

    Raises:
        ScheduleError: the schedule is not valid, or several steps are asked for without post-validation.
    """
    validate(schedule)
    costs = stage_costs(flags, schedule.placement)
    if post_validation:
        schedule = with_post_validation(schedule, costs)
        validate(schedule)
    elif steps > 1 and not schedule.has_post_validation:
        raise ScheduleError(
            f"--steps {steps} needs --post-validation: without it an iteration starts when the one before has ended"
        )
    check_size(schedule.placement, schedule.num_microbatches * steps)
    schedules = [schedule, without_post_validation(schedule)]
    if queues is not None:
        schedules = [schedule if schedule.is_lowered else lower(schedule, costs=costs) for schedule in schedules]
    overlap = flags.overlap_communication
    repeated = repeat(schedules[0], steps)
    timeline = simulate(repeated, costs, overlap_communication=overlap, hardware_queues=queues, lengths=lengths)
    with_it, without = (
        timeline.makespan
        if lengths
        else iteration_time(schedule, costs, overlap_communication=overlap, hardware_queues=queues)
        for schedule in schedules
    )
    return ScheduleFigures(
        schedule,
        timeline,
        steps,
        with_it,
        without,
        max(timeline.work),
        generation_seconds,
        _cost_in_backward(schedules[1], timeline),
    )


def _cost_in_backward(schedule: Schedule, timeline: Timeline) -> float | None:
    """The cost of `schedule` with the costs of `timeline`, if every backward recomputes; None if not all is."""
    if not schedule.recomputes or num_recomputed(schedule) < num_recomputed(with_recomputation(schedule)):
        return None
    plain = lower(without_recomputation(schedule)) if timeline.hardware_queues else without_recomputation(schedule)
    return simulate(
        plain,
        timeline.costs.recomputing_in_backward(),
        overlap_communication=timeline.overlap_communication,
        hardware_queues=timeline.hardware_queues,
        lengths=timeline.lengths,
    ).cost
