"""Estimates all schedules of a job and, where none of them fits, what recomputation would do."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, estimate
from megatron.zero_bubble.job.flags import flag_name
from megatron.zero_bubble.schedule.generators import ENTRIES, entry_of
from megatron.zero_bubble.schedule.recomputation import Recompute

T = TypeVar("T")

SMALL_JOB = 1000
"""Fewer pipeline ranks times microbatches than these are planned in one process."""
_FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_PLANNED: dict[str, Any] = {
    "zero_bubble": True,
    "zero_bubble_memory_limit": "auto",
    "zero_bubble_recompute": Recompute.PLANNED.value,
}
_WITHOUT: dict[str, Any] = {**dict.fromkeys(_FULL), "zero_bubble_recompute": None}
"""The flags of recomputation in a job that recomputes nothing."""


@dataclass(frozen=True)
class WayOut:
    """What becomes of a job of which nothing fits if it recomputes activations."""

    flags: str
    """The flags that the job would be given, in place of its own for recomputation."""
    best: Estimate
    """The fastest schedule that then fits, or, if none does, the one that needs the least memory."""
    reference_ms: float
    """The fastest iteration without these flags, on devices with more memory."""

    @property
    def slowdown(self) -> float:
        return self.best.iteration_ms / self.reference_ms

    def as_json(self) -> dict[str, Any]:
        name = self.best.timeline.schedule.name
        needed = max(self.best.total_bytes)
        return {"flags": self.flags, "schedule": name, "fits": self.best.fits, "bytes": needed, "time": self.slowdown}


@dataclass(frozen=True)
class Results:
    """Everything that `zero-bubble estimate` has to say about a job."""

    job: EstimatedJob
    found: list[Estimate]
    refused: dict[str, str]
    """By schedule that is not possible, the reason."""
    ways_out: list[WayOut]
    """Where nothing fits, what recomputation does; otherwise empty."""


def results_of(job: EstimatedJob, chosen: Sequence[str] | None) -> Results:
    """Estimate the schedules `chosen`, or all that are planned quickly.

    Raises:
        ValueError: a schedule does not exist, or none of them is possible.
    """
    names = chosen or [name for name, entry in ENTRIES.items() if not entry.is_slow]
    found, refused = _estimates(job, names)
    if not found:
        reasons = {reason: name for name, reason in reversed(refused.items())}
        raise ValueError("; ".join(f"--schedule {name}: {reason}" for reason, name in reversed(reasons.items())))
    return Results(job, found, refused, list(_ways_out(job, found)))


def _estimates(job: EstimatedJob, names: Sequence[str]) -> tuple[list[Estimate], dict[str, str]]:
    """Return the estimates of the schedules that are possible, and the reasons of those that are not, by name."""
    for name in names:
        entry_of(name)
    estimates = _in_processes(partial(_estimate_or_reason, job), names, _num_processes(job))
    answers = dict(zip(names, estimates, strict=True))
    found = [answer for answer in answers.values() if isinstance(answer, Estimate)]
    return found, {name: answer for name, answer in answers.items() if isinstance(answer, str)}


def _estimate_or_reason(job: EstimatedJob, name: str) -> Estimate | str:
    """Return the estimate of a schedule with its times computed, or the reason why it is not possible."""
    try:
        one = estimate(job, name)
    except ValueError as error:
        return str(error)
    assert one.iteration_ms > 0, "computed here, not where all estimates come together"
    return one


def _num_processes(job: EstimatedJob) -> int:
    """Return how many processes plan schedules: one for a small job, which is planned before another could start."""
    is_small = job.args.pipeline_model_parallel_size * job.num_microbatches < SMALL_JOB
    if is_small or not hasattr(os, "sched_getaffinity"):  # only Linux has it, and forks safely
        return 1
    return len(os.sched_getaffinity(0))


def _in_processes(function: Callable[[str], T], names: Sequence[str], num_processes: int) -> list[T]:
    """Return `function` of every name, computed in at most `num_processes` processes."""
    if min(num_processes, len(names)) == 1:
        return [function(name) for name in names]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(num_processes, len(names)), context) as processes:
        return list(processes.map(function, names))


def _ways_out(job: EstimatedJob, found: Sequence[Estimate]) -> Iterator[WayOut]:
    # A profile measures no recomputation that its run did not have.
    if job.profile is not None or any(one.fits for one in found):
        return
    reference = min(one.iteration_ms for one in found)
    names = [one.timeline.schedule.name for one in found]
    if job.flags.recompute is not Recompute.FULL:
        yield from _way_out(job, _FULL, names, reference)
    if job.flags.recompute is not Recompute.PLANNED:
        yield from _way_out(job, _PLANNED, ["auto"], reference)


def _way_out(
    job: EstimatedJob, flags: Mapping[str, Any], names: Sequence[str], reference_ms: float
) -> Iterator[WayOut]:
    """Yield what `flags` bring in place of the job's own for recomputation, if any schedule is then possible."""
    changed = {**_WITHOUT, **flags}
    other = replace(job, args=replace(job.args, **changed), flags=replace(job.flags, **changed))
    estimates, _ = _estimates(other, names)
    fitting = [one for one in estimates if one.fits]
    if fitting:
        yield WayOut(_written(flags), min(fitting, key=lambda one: one.iteration_ms), reference_ms)
    elif estimates:
        yield WayOut(_written(flags), min(estimates, key=lambda one: max(one.total_bytes)), reference_ms)


def _written(flags: Mapping[str, Any]) -> str:
    """Return flags as they are written on a command line."""
    return " ".join(flag_name(name) if value is True else f"{flag_name(name)} {value}" for name, value in flags.items())
