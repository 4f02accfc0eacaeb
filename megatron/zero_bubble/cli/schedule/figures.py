"""What a schedule costs: the figures that simulate, compare and memory-curve print."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.schedule.rank_costs import stage_costs
from megatron.zero_bubble.schedule import (
    HardwareQueues,
    Op,
    Schedule,
    ScheduleError,
    Timeline,
    bubbles,
    critical_path,
    generate,
    iteration_time,
    lower,
    names,
    placement_for,
    repeat,
    simulate,
    validate,
    with_post_validation,
)
from megatron.zero_bubble.schedule.formats import schedule_from_text
from megatron.zero_bubble.schedule.generators import entry_of
from megatron.zero_bubble.schedule.ir import check_size
from megatron.zero_bubble.schedule.kinds import SENDS
from megatron.zero_bubble.schedule.memory import peaks
from megatron.zero_bubble.schedule.step_ops import operation_name, without_post_validation


@dataclass(frozen=True)
class Report:
    """A valid schedule and its simulation, memory in M_B."""

    schedule: Schedule
    """Of one iteration."""
    timeline: Timeline
    """Of `steps` iterations."""
    steps: int
    iteration_time: float
    """From one iteration to the next."""
    without_post_validation: float
    """The same if every iteration waits for the last rank of the one before."""
    lower_bound: float
    generation_seconds: float

    @property
    def gain(self) -> float:
        """By what share iterations are faster for post-validation."""
        return float(self.without_post_validation / self.iteration_time - 1)

    @property
    def above_bound(self) -> float:
        """By what share the cost is above the lower bound."""
        return float(self.timeline.cost / self.lower_bound - 1) if self.lower_bound else 0.0

    @property
    def peak_memory(self) -> list[float]:
        """Of every rank, in M_B."""
        return [float(peak) for peak in self.timeline.peak_memory]

    @property
    def num_messages(self) -> int:
        """Tensors that cross ranks in a step."""
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
            "bubble_rate": timeline.bubble_rate,
            "lower_bound": self.lower_bound,
            "peak_memory": self.peak_memory,
            "peak_memory_op": [self._name(peak.op) for peak in peaks(timeline.schedule, timeline.costs)],
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


def make_schedule(arguments: argparse.Namespace, name: str, limit: Sequence[float] | None) -> tuple[Schedule, float]:
    """The schedule `name` for the sizes and costs of the flags under `limit` (in M_B), and the seconds it took."""
    placement = placement_for(name, arguments.pipeline_size, arguments.num_chunks)
    costs = stage_costs(arguments, placement)
    begin = time.perf_counter()
    schedule = generate(
        name,
        arguments.pipeline_size,
        arguments.num_microbatches,
        costs=costs,
        num_chunks=placement.num_chunks,
        memory_limit=limit[0] if limit is not None and len(limit) == 1 else limit,
        group_size=arguments.microbatch_group_size,
        overlap_communication=arguments.overlap,
    )
    return schedule, time.perf_counter() - begin


def read_schedule(path: Path) -> Schedule:
    """The schedule in `path`, in any format."""
    try:
        return schedule_from_text(path.read_text(encoding="utf-8"), name=path.stem)
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: {error}") from None


def report_on(arguments: argparse.Namespace) -> Report:
    """The schedule that --schedule or --input names."""
    if arguments.input is not None:
        schedule, seconds = read_schedule(arguments.input), 0.0
    else:
        schedule, seconds = make_schedule(arguments, arguments.schedule, arguments.memory_limit)
    return report(arguments, schedule, seconds, post_validation=arguments.post_validation, steps=arguments.steps)


def report_on_all(
    arguments: argparse.Namespace, leave_out: Collection[str] = (), *, post_validation: bool = False
) -> list[Report]:
    """The schedules that --schedule names, or all that can be but those to `leave_out`.

    What was asked for by name has to be there: raises `ScheduleError` otherwise.
    """
    found: list[Report] = []
    refusal: ScheduleError | None = None
    for name in arguments.schedule or [name for name in names() if name not in leave_out]:
        entry = entry_of(name)
        own = argparse.Namespace(**vars(arguments))
        if "num_chunks" not in entry.options:
            own.num_chunks = None
        if "group_size" not in entry.options:
            own.microbatch_group_size = None
        try:
            made = make_schedule(own, name, arguments.memory_limit)
            found.append(report(own, *made, post_validation=post_validation))
        except ScheduleError as error:
            refusal = error
            if arguments.schedule:
                break
    if refusal is not None and (arguments.schedule or not found):
        raise refusal
    return found


def report(
    arguments: argparse.Namespace,
    schedule: Schedule,
    generation_seconds: float,
    *,
    post_validation: bool = False,
    steps: int = 1,
) -> Report:
    """Validate and simulate `steps` iterations, after each other with post-validation, which is added if asked for."""
    validate(schedule)
    costs = stage_costs(arguments, schedule.placement)
    if post_validation:
        schedule = with_post_validation(schedule, costs)
        validate(schedule)
    elif steps > 1 and not schedule.has_post_validation:
        raise ScheduleError(
            f"--steps {steps} needs --post-validation: without it an iteration starts when the one before has ended"
        )
    check_size(schedule.placement, schedule.num_microbatches * steps)
    given = vars(arguments).get("hardware_queues")
    queues = None if given is None else HardwareQueues(given)
    schedules = [schedule, without_post_validation(schedule)]
    if queues is not None:
        schedules = [one if one.is_lowered else lower(one, costs=costs) for one in schedules]
    timeline = simulate(
        repeat(schedules[0], steps), costs, overlap_communication=arguments.overlap, hardware_queues=queues
    )
    with_it, without = (
        iteration_time(one, costs, overlap_communication=arguments.overlap, hardware_queues=queues) for one in schedules
    )
    return Report(schedule, timeline, steps, with_it, without, _lower_bound(timeline), generation_seconds)


def _lower_bound(timeline: Timeline) -> float:
    return max(timeline.work)
