"""Computes the figures of a schedule that `simulate`, `compare` and `memory-curve` print."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.schedule.arguments import SimulationFlags, SourceFlags
from megatron.zero_bubble.cli.schedule.rank_costs import stage_costs
from megatron.zero_bubble.cli.shared_flags import CostFlags, PostValidationFlags, ScheduleFlags
from megatron.zero_bubble.planner import PlanRequest, placement_for, schedule_of
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of
from megatron.zero_bubble.planner.request import EFFORT
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
from megatron.zero_bubble.schedule.formats import schedule_from_text
from megatron.zero_bubble.schedule.host_link import host_memory, num_offloaded
from megatron.zero_bubble.schedule.ir import check_size
from megatron.zero_bubble.schedule.kinds import SENDS
from megatron.zero_bubble.schedule.recomputation import (
    Recompute,
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


def make_schedule(
    flags: ScheduleFlags,
    name: str,
    limit: Sequence[float] | None,
    *,
    post_validation: bool = False,
    takes_makespan: bool = False,
    effort: int = EFFORT,
) -> tuple[Schedule, float]:
    """Generate the schedule `name` from the flags under `limit` (in M_B); return it and the seconds that took.

    `takes_makespan` and `effort` are as in `PlanRequest`.
    """
    placement = placement_for(name, flags.pipeline_size, flags.num_chunks, flags.placement)
    costs = stage_costs(flags, placement)
    if flags.recomputation is not Recompute.NONE and not any(costs.memory_r):
        source = "--memory-r is 0" if flags.costs is None else f"{flags.costs} has no memory_r"
        raise ScheduleError(f"argument --recompute {flags.recompute}: {source}, so nothing can be dropped")
    if flags.offloads and limit is None:
        raise ScheduleError("argument --offload auto needs --memory-limit: without it nothing has to leave the device")
    if flags.offloads and not any(costs.memory_d):
        source = "--memory-d is 0" if flags.costs is None else f"{flags.costs} has no memory_d"
        raise ScheduleError(f"argument --offload auto: {source}, so nothing can be copied to the host")
    begin = time.perf_counter()
    request = PlanRequest(
        name,
        flags.num_microbatches,
        (placement,),
        costs,
        memory_limit=limit[0] if limit is not None and len(limit) == 1 else limit,
        group_size=flags.microbatch_group_size,
        overlap_communication=flags.overlap_communication,
        post_validation=post_validation,
        takes_makespan=takes_makespan,
        recomputes=(flags.recomputation,),
        vocabulary_parallel=costs.has_vocabulary,
        pairs=costs.has_all_to_all,
        offloads=flags.offloads,
        effort=effort,
    )
    schedule = schedule_of(request)
    return schedule, time.perf_counter() - begin


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from a file of any supported format. Raises `ScheduleError`."""
    try:
        return schedule_from_text(path.read_text(encoding="utf-8"), name=path.stem)
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: {error}") from None


def figures_of_source(flags: SimulationFlags, effort: int = EFFORT, *, takes_makespan: bool = False) -> ScheduleFigures:
    """Return the figures of the schedule that --schedule or --input names; arguments are as in `PlanRequest`."""
    schedule, seconds = source(flags, effort, takes_makespan=takes_makespan)
    return simulated_figures(
        flags,
        schedule,
        seconds,
        post_validation=flags.post_validation,
        steps=flags.steps,
        queues=flags.queues,
        lengths=flags.relative_lengths,
    )


def source(flags: SourceFlags, effort: int = EFFORT, *, takes_makespan: bool = False) -> tuple[Schedule, float]:
    """Return the schedule that --schedule or --input names, and the seconds that generating it took.

    `effort` and `takes_makespan` are as in `PlanRequest`.
    """
    if flags.input is not None:
        return read_schedule(flags.input), 0.0
    assert flags.schedule is not None
    interlocks = isinstance(flags, PostValidationFlags) and flags.post_validation
    return make_schedule(
        flags,
        flags.schedule,
        flags.memory_limit,
        post_validation=interlocks,
        takes_makespan=takes_makespan,
        effort=effort,
    )


def figures_of_all(
    flags: ScheduleFlags,
    chosen: Sequence[str] | None,
    limit: Sequence[float] | None,
    *,
    leaves_out_slow: bool = False,
    post_validation: bool = False,
    queues: HardwareQueues | None = None,
) -> list[ScheduleFigures]:
    """Return the figures of the schedules `chosen`, or of all that are possible.

    Args:
        limit: memory limit in M_B, one for all ranks or one for each.
        leaves_out_slow: whether to skip the slow schedules if none is chosen.

    Raises:
        ScheduleError: a schedule that was chosen by name is not possible, or none is.
    """
    all_figures: list[ScheduleFigures] = []
    refusal: ScheduleError | None = None
    for name in chosen or [name for name in ENTRIES if not (leaves_out_slow and ENTRIES[name].is_slow)]:
        entry = entry_of(name)
        own = replace(
            flags,
            num_chunks=flags.num_chunks if entry.takes_num_chunks else None,
            placement=flags.placement if entry.takes_placement else None,
        )
        try:
            placement = placement_for(name, own.pipeline_size, own.num_chunks, own.placement)
            if placement.kind != "interleaved":
                own = replace(own, microbatch_group_size=None)
            made = make_schedule(own, name, limit, post_validation=post_validation)
            all_figures.append(simulated_figures(own, *made, post_validation=post_validation, queues=queues))
        except ScheduleError as error:
            refusal = error
            if chosen:
                break
    if refusal is not None and (chosen or not all_figures):
        raise refusal
    return all_figures


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
        schedules = [one if one.is_lowered else lower(one, costs=costs) for one in schedules]
    overlap = flags.overlap_communication
    repeated = repeat(schedules[0], steps)
    timeline = simulate(repeated, costs, overlap_communication=overlap, hardware_queues=queues, lengths=lengths)
    with_it, without = (
        timeline.makespan
        if lengths
        else iteration_time(one, costs, overlap_communication=overlap, hardware_queues=queues)
        for one in schedules
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
