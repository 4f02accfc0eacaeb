"""Turns the records of an emulated run into the files that a training writes: a profile and timelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.emulation.emulated_results import Result
from benchmarks.emulation.worker import StepRecord
from megatron.zero_bubble.runtime.profiler import Profiler, combine_costs
from megatron.zero_bubble.runtime.recorder import MeasuredOp
from megatron.zero_bubble.schedule import Schedule, StageCosts, TimedOp
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.session.timeline_files import measured_timeline, write_timeline


def profile_of(result: Result) -> Profile:
    """Return the measured costs of a schedule, computed over all steps with the code that trainings use.

    Memory is not measured: the profile has the memory of the emulated costs, in the unit of these costs. If nothing was
    recomputed, the time of R also comes from the emulated costs.
    """
    schedule, asked = result.timeline.schedule, result.timeline.costs
    assert result.edges is not None
    profilers = [Profiler(schedule.placement, rank) for rank in range(schedule.num_ranks)]
    for step in result.steps:
        for rank, record in enumerate(step):
            profilers[rank].add(_measured_ops(schedule, rank, record))
    gathered = [(profiler.costs(), edges) for profiler, edges in zip(profilers, result.edges, strict=True)]
    costs, noise, *_ = combine_costs(schedule.placement, gathered)
    costs = replace(
        costs,
        time_comm=_edges(costs, asked, schedule),
        memory_f=asked.memory_f,
        memory_b=asked.memory_b,
        memory_w=asked.memory_w,
        memory_r=asked.memory_r,
        time_r=tuple(measured or given for measured, given in zip(costs.time_r, asked.time_r, strict=True)),
    )
    return Profile(schedule.placement, costs, noise, {"emulated": True})


def _edges(costs: StageCosts, asked: StageCosts, schedule: Schedule) -> tuple[float, ...]:
    """Return s -> milliseconds of a message between stages s and s + 1: the longer of measured and emulated time."""
    placement = schedule.placement
    return tuple(
        max(measured, asked.time_comm[edge]) if placement.rank_of(edge) != placement.rank_of(edge + 1) else 0.0
        for edge, measured in enumerate(costs.time_comm)
    )


def draw_median_step(result: Result, folder: Path) -> None:
    """Write timeline files of the step with the median makespan into `folder`."""
    makespans = result.makespans
    median_step = sorted(range(len(makespans)), key=makespans.__getitem__)[len(makespans) // 2]
    schedule = result.timeline.schedule
    lanes = [
        [TimedOp(one.op, one.start * 1e3, one.end * 1e3) for one in _measured_ops(schedule, rank, record)]
        for rank, record in enumerate(result.steps[median_step])
    ]
    write_timeline(folder, result.name, measured_timeline(schedule, lanes, profile_of(result).costs), "M_B")


def _measured_ops(schedule: Schedule, rank: int, record: StepRecord) -> list[MeasuredOp]:
    assert record.ops is not None
    ops = schedule.compute_ops(rank)
    return [MeasuredOp(op, start, end) for op, (start, end) in zip(ops, record.ops, strict=True)]
