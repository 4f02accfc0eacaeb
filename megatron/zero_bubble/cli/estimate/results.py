"""Estimates all schedules of a job, its layout and, where no schedule fits, other layouts and recomputation."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, LayoutEstimate, estimate, estimate_layout
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.flags import flags_text
from megatron.zero_bubble.session.layout_choice import is_layout_open, megatrons_layout_flags

T = TypeVar("T")

_LAYOUT = "layout"
"""Stands for the search of the layout beside names of schedules."""
_FREED = "layout without Megatron's flags"
"""Stands for the search of all layouts where Megatron's flags fix one."""

SMALL_JOB = 1000
"""Fewer pipeline ranks times microbatches than these are planned in one process."""
LARGE_JOB = 2000
"""Pipeline ranks times microbatches from which on a job is planned quickly where the user names no schedule."""
_FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_PLANNED: dict[str, Any] = {
    "zero_bubble": True,
    "zero_bubble_memory_limit": "auto",
    "zero_bubble_recompute": Recompute.PLANNED.value,
}
_WITHOUT: dict[str, Any] = dict.fromkeys((*_FULL, "zero_bubble_recompute"))
"""The flags of recomputation in a job that recomputes nothing."""


@dataclass(frozen=True)
class WayOut:
    """The outcome of another layout or of recomputation, for a job of which no schedule fits."""

    flags: str
    """The flags that the job would be given, in place of its own for layout or recomputation."""
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
    estimates: list[Estimate]
    refused: dict[str, str]
    """Reason for every schedule that is not possible, by name; under `layout`, the reason why no layout is possible."""
    layout: LayoutEstimate | None = None
    """The layout that the training would choose; None if its flags fix one, or none is possible."""
    freed: LayoutEstimate | None = None
    """The layout that the training would choose without Megatron's layout flags; None without such flags."""
    ways_out: Sequence[WayOut] = ()
    """The outcomes of other layouts and of recomputation where no schedule fits; otherwise empty."""
    added_flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags that Megatron needs to cut the layers into stages, and with which the schedules were estimated."""

    @property
    def shown(self) -> tuple[EstimatedJob, Placement]:
        """The job whose parameters and operations are shown, and its placement: those of the first schedule."""
        if self.estimates:
            return self.estimates[0].job, self.estimates[0].timeline.schedule.placement
        assert self.layout is not None
        return self.layout.estimate.job, self.layout.choice.plan.layout.placement


def results_of(job: EstimatedJob, chosen: Sequence[str] | None) -> Results:
    """Estimate the schedules `chosen`, or all that are planned quickly, and the layout if the flags leave it open.

    Raises:
        ValueError: a schedule does not exist, or nothing is possible.
    """
    names = chosen or [name for name, entry in ENTRIES.items() if not entry.is_slow]
    job = replace(job, is_quick=chosen is None and _size(job) >= LARGE_JOB)
    results = _estimated(job, names, frees_layout=bool(megatrons_layout_flags(job.flags)))
    if not results.estimates and (chosen is None or "1f1b" in chosen):
        added = _even_ends(job)
        split = _estimated(job.with_flags({**added, "zero_bubble_keep_layout": True}), names)
        if split.estimates:
            results = replace(results, estimates=split.estimates, refused=split.refused, added_flags=added)
    if not results.estimates and results.layout is None:
        reasons = by_reason(results.refused).items()
        raise ValueError("; ".join(f"--schedule {names[0]}: {reason}" for reason, names in reasons))
    return replace(results, ways_out=list(_ways_out(results)))


def by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that were refused for each reason."""
    return {reason: [name for name in refused if refused[name] == reason] for reason in refused.values()}


def _even_ends(job: EstimatedJob) -> dict[str, Any]:
    """Return the flags with which Megatron cuts layers that the pipeline ranks do not divide."""
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    for given in (ends, ends[:1], ends[1:]):
        if (job.args.num_layers + len(given)) % job.args.pipeline_model_parallel_size == 0:
            return dict.fromkeys(given, True)
    return {"allow_padding_num_layers": True}


def _estimated(job: EstimatedJob, names: Sequence[str], *, frees_layout: bool = False) -> Results:
    """Estimate the schedules, the layout if it is open and, if asked, the one without Megatron's flags for it."""
    for name in names:
        entry_of(name)
    # Layouts come first, because their search takes longer than any schedule.
    searches = [*[_FREED] * frees_layout, *[_LAYOUT] * is_layout_open(job.flags)]
    tasks = [*searches, *names]
    answers = dict(zip(tasks, _in_processes(partial(_answer, job), tasks, _num_processes(job)), strict=True))
    estimates = [answer for answer in answers.values() if isinstance(answer, Estimate)]
    refused = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    layout, freed = (
        answer if isinstance(answer, LayoutEstimate) else None for answer in map(answers.get, (_LAYOUT, _FREED))
    )
    return Results(job, estimates, refused, layout, freed)


def _answer(job: EstimatedJob, task: str) -> Estimate | LayoutEstimate | str:
    """Return the estimate of the schedule or of the layout, or the reason why it is not possible."""
    if task not in (_LAYOUT, _FREED):
        return _estimate_or_reason(job, task)
    try:
        return estimate_layout(job, frees_layout=task == _FREED)
    except ValueError as error:
        return str(error)


def _estimate_or_reason(job: EstimatedJob, name: str) -> Estimate | str:
    """Return the estimate of a schedule with its times computed, or the reason why it is not possible."""
    try:
        answer = estimate(job, name)
    except ValueError as error:
        return str(error)
    assert answer.iteration_ms > 0, "computed here, not where all estimates come together"
    return answer


def _size(job: EstimatedJob) -> int:
    """Return the pipeline ranks times the microbatches."""
    return job.args.pipeline_model_parallel_size * job.num_microbatches


def _num_processes(job: EstimatedJob) -> int:
    """Return how many processes plan schedules: one for a small job, which is planned before another could start."""
    if _size(job) < SMALL_JOB or not hasattr(os, "sched_getaffinity"):  # only Linux has it, and forks safely
        return 1
    return len(os.sched_getaffinity(0))


def _in_processes(function: Callable[[str], T], names: Sequence[str], num_processes: int) -> list[T]:
    """Return `function` of every name, computed in at most `num_processes` processes."""
    if min(num_processes, len(names)) == 1:
        return [function(name) for name in names]
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(num_processes, len(names)), context) as processes:
        return list(processes.map(function, names))


def _ways_out(results: Results) -> Iterator[WayOut]:
    job, estimates, layout = results.job, results.estimates, results.layout
    if not estimates or any(candidate.fits for candidate in estimates):
        return
    reference = min(candidate.iteration_ms for candidate in estimates)
    if layout is not None:
        yield WayOut(flags_text(layout.flags), layout.estimate, reference)
        return
    # A profile measures no recomputation that its run did not have.
    if job.profile is not None:
        return
    names = [candidate.timeline.schedule.name for candidate in estimates]
    if job.flags.recompute is not Recompute.FULL:
        yield from _way_out(job, _FULL, names, reference)
    if job.flags.recompute is not Recompute.PLANNED:
        yield from _way_out(job, _PLANNED, ["auto"], reference)


def _way_out(
    job: EstimatedJob, flags: Mapping[str, Any], names: Sequence[str], reference_ms: float
) -> Iterator[WayOut]:
    """Yield the outcome of `flags` in place of the job's own flags for recomputation, if any schedule is then
    possible."""
    other = job.with_flags({**_WITHOUT, **flags})
    results = _estimated(other, names)
    estimates = [*results.estimates, *([] if results.layout is None else [results.layout.estimate])]
    fitting = [candidate for candidate in estimates if candidate.fits]
    if fitting:
        yield WayOut(flags_text(flags), min(fitting, key=lambda candidate: candidate.iteration_ms), reference_ms)
    elif estimates:
        yield WayOut(flags_text(flags), min(estimates, key=lambda candidate: max(candidate.total_bytes)), reference_ms)
