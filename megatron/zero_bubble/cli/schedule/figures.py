"""Reads the costs of stages, simulates schedules, and computes the figures that `simulate` and `compare` print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from operator import sub
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.shared_flags import COSTS_OF_FLAGS, CostFlags
from megatron.zero_bubble.planner.prediction import recomputed_in_backward
from megatron.zero_bubble.schedule import (
    HardwareQueues,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    StageCosts,
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
from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.costs import SMALLEST
from megatron.zero_bubble.schedule.default_costs import DROPPED, with_host_link
from megatron.zero_bubble.schedule.formats import costs_from_text, is_profile
from megatron.zero_bubble.schedule.host_link import host_memory, offloaded_share
from megatron.zero_bubble.schedule.ir import check_size
from megatron.zero_bubble.schedule.kinds import BACKWARDS, POST_VALIDATION, SENDS, OpKind
from megatron.zero_bubble.schedule.recomputation import num_recomputed, with_recomputation
from megatron.zero_bubble.schedule.step_ops import operation_name
from megatron.zero_bubble.session.files import read_file, reading
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.timeline_files import in_memory_unit


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
    """Time from one iteration to the next if an iteration starts only after all ranks have ended the previous one."""
    lower_bound: float
    generation_seconds: float
    cost_in_backward: float | None
    """Cost of the schedule with R inside B, as in megatron-core; None unless one iteration is simulated, and all
    activations are recomputed."""

    @property
    def gain(self) -> float:
        """Fraction by which post-validation increases the speed of iterations."""
        return float(self.without_post_validation / self.iteration_time - 1)

    @property
    def lost(self) -> float:
        """Fraction of the schedule's cost (the longest span of a rank) that is bubble or recomputation, in R or B."""
        recomputing = map(self._recomputing, range(self.schedule.num_ranks))
        return float(1 - max(map(sub, self.timeline.work, recomputing)) / self.timeline.cost)

    @property
    def recomputed(self) -> float:
        """Number of recomputations (R), divided by the product of the numbers of stages and microbatches."""
        return num_recomputed(self.schedule) / (self.schedule.num_stages * self.schedule.num_microbatches)

    @property
    def host_memory(self) -> list[float]:
        """Peak host memory of every rank, in M_B."""
        return [float(peak) for peak in host_memory(self.schedule, self.timeline.costs)]

    @property
    def above_bound(self) -> float:
        """Fraction by which the schedule's cost exceeds the lower bound of the cost."""
        return float(self.timeline.cost / self.lower_bound - 1) if self.lower_bound else 0.0

    @property
    def peak_memory(self) -> list[float]:
        """Peak memory of every rank, in M_B."""
        return [float(peak) for peak in self.timeline.peak_memory]

    @property
    def num_messages(self) -> int:
        """Number of tensors that ranks send to each other in one iteration."""
        return num_messages(lower(self.schedule))

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
            "offloaded": offloaded_share(self.schedule),
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

    def _recomputing(self, rank: int) -> float:
        """Time in which `rank` recomputes activations; a B that restores groups of layers recomputes, too."""
        timeline, costs = self.timeline, self.timeline.costs
        stages, grouped = self.schedule.placement.stages_of(rank), in_groups(costs, self.schedule.groups)
        time = 0.0
        for timed in timeline.lanes[rank]:
            kind, stage = timed.op.kind, stages[timed.op.chunk]
            if kind is OpKind.R:
                time += timed.end - timed.start
            elif kind in BACKWARDS:
                in_backward = costs.time_r[stage] - grouped.time_r[stage]
                time += (timed.end - timed.start) * in_backward / grouped.times[kind][stage]
        return time

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
    """Validate a schedule and simulate `steps` iterations, with post-validation if `post_validation` is set.

    Raises:
        ScheduleError: the schedule is not valid, or `steps` is above 1 without post-validation.
    """
    validate(schedule)
    costs = stage_costs(flags, schedule.placement)
    if post_validation:
        schedule = with_post_validation(schedule, costs)
        validate(schedule)
    elif steps > 1 and not schedule.has_post_validation:
        raise ScheduleError(
            f"--steps {steps} needs --post-validation: otherwise an iteration starts when the previous one has ended"
        )
    check_size(schedule.placement, schedule.num_microbatches * steps)
    schedules = [schedule, schedule.without(POST_VALIDATION)]
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
        None if steps > 1 else _cost_in_backward(schedules[1], timeline),
    )


def _cost_in_backward(schedule: Schedule, timeline: Timeline) -> float | None:
    """Return a schedule's cost with R inside B, as in megatron-core; None unless all activations are recomputed."""
    if not schedule.recomputes or num_recomputed(schedule) < num_recomputed(with_recomputation(schedule)):
        return None
    return recomputed_in_backward(schedule, timeline).cost


_ROUNDING = 1e-6
"""Tolerance for rounding errors, in units of M_B: B and W may release this much more memory than F allocates."""
BYTES_PER_MS = 1e6
"""Bytes that a link of 1 GB/s sends in a millisecond."""
_PARTS_OF_F = {
    "time_r": ("time_f", 1),
    "memory_r": ("memory_f", DROPPED),
    "time_h": ("time_d", 1),
    "memory_d": ("memory_f", DROPPED),
}
"""Field of `StageCosts` -> (other field, factor); the field's default is the product of the other field and factor."""


def stage_costs(flags: CostFlags, placement: Placement) -> StageCosts:
    """Return the costs of every stage of `placement`, with memory in M_B.

    Flags, and cost files with one entry per rank, give the costs of whole ranks; `stage_costs` splits these costs among
    the chunks of each rank. M_B is the activation memory of one microbatch on all chunks of a rank, for the rank
    where this memory is largest.

    Raises:
        ScheduleError: the number of costs does not fit the placement, or M_B is not above zero.
    """
    costs = _costs_of_ranks(flags, placement.num_ranks).split_ranks(placement)
    if flags.vocabulary_parallel is not None:
        share = flags.vocabulary_parallel / placement.num_ranks
        costs = costs.with_shards(placement, {"time_s": 2 * share, "time_t": share})
    if flags.costs is not None:
        costs = read_costs(flags.costs)
        if costs.num_stages == placement.num_ranks:
            costs = costs.split_ranks(placement)
        elif costs.num_stages != placement.num_stages:
            sizes = sorted({placement.num_ranks, placement.num_stages})
            raise ScheduleError(
                f"argument --costs {flags.costs}: costs of {costs.num_stages} stages, but --pipeline-size "
                f"{placement.num_ranks} needs {' or '.join(map(str, sizes))}"
            )
        num_shards = sum(time > 0 for time in costs.time_s)
        if num_shards not in (0, placement.num_ranks):
            raise ScheduleError(
                f"argument --costs {flags.costs}: costs of {num_shards} vocabulary shards, one for each rank, need "
                f"--pipeline-size {num_shards}, got {placement.num_ranks}"
            )
        if flags.host_bandwidth is not None:
            if not is_profile(_text_of(flags.costs)):
                raise ScheduleError(
                    f"argument --host-bandwidth needs memory in bytes, as in a profile; --costs {flags.costs} is none: "
                    "give --time-d"
                )
            costs = with_host_link(costs, flags.host_bandwidth * BYTES_PER_MS)
    ranks = costs.whole_ranks(placement)
    m_b = max(ranks.memory_f)
    if m_b < SMALLEST:
        raise ScheduleError(f"M_B, the memory of F on a whole rank, must be above zero, got {m_b:g}")
    for rank, change in enumerate(zip(ranks.memory_f, ranks.memory_b, ranks.memory_w, strict=True)):
        if sum(change) < -_ROUNDING * m_b:
            raise ScheduleError(
                f"B and W of rank {rank} release more memory than F allocates: memory_f {change[0]:g}, memory_b "
                f"{change[1]:g} and memory_w {change[2]:g} must add up to 0 or more"
            )
    return in_memory_unit(costs, m_b)


def microbatch_bytes(flags: CostFlags, placement: Placement) -> float | None:
    """Return M_B in bytes if --costs is a profile, which has memory in bytes; otherwise None."""
    if flags.costs is None or not is_profile(_text_of(flags.costs)):
        return None
    costs = read_costs(flags.costs)
    return max(costs.memory_f if costs.num_stages == placement.num_ranks else placement.sums(costs.memory_f))


def num_messages(lowered: Schedule) -> int:
    """Number of tensors that the ranks of a lowered schedule send to each other in one iteration."""
    return sum(op.kind in SENDS for ops in lowered.ops for op in ops)


def forget_files() -> None:
    """Let files of costs be read again, because their contents may have changed."""
    read_costs.cache_clear()
    _text_of.cache_clear()


@cache
def read_costs(path: Path) -> StageCosts:
    with reading(f"argument --costs {path}"):
        return costs_from_text(_text_of(path))


@cache
def _text_of(path: Path) -> str:
    """Return the text of a file, which is read only once, because a pipe cannot be read twice."""
    return read_file(path)


def _costs_of_ranks(flags: CostFlags, num_ranks: int) -> StageCosts:
    times = dict.fromkeys(("time_f", "time_b", "time_w"), flags.default_time)
    defaults = {**times, "memory_f": 1, "memory_b": -0.5, "memory_w": -0.5}
    values: dict[str, tuple[float, ...]] = {}
    for name in COSTS_OF_FLAGS:
        given: Sequence[float] | None = getattr(flags, name)
        length = num_ranks - 1 if name == "time_comm" else num_ranks
        if given is None and name in _PARTS_OF_F:
            of_f, part = _PARTS_OF_F[name]
            given = [max(0, value * part) for value in values[of_f]]
        entries = (defaults.get(name, 0),) if given is None else tuple(given)
        if len(entries) not in (1, length):
            raise ScheduleError(f"argument {flag_name(name)}: expected 1 number or {length}, got {len(entries)}")
        values[name] = entries * length if len(entries) == 1 else entries
    return StageCosts(**values)
