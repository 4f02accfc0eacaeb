"""Estimates a job's schedules and layout, and also other layouts and recomputation if no schedule fits in memory."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import (
    Estimate,
    LayoutEstimate,
    as_megatron_runs,
    estimate,
    estimate_layout,
)
from megatron.zero_bubble.mcore.refusals import works_with
from megatron.zero_bubble.mcore.refused_settings import Feature
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.flags import flags_text
from megatron.zero_bubble.session.job_flags import FULL_RECOMPUTATION, RECOMPUTATION
from megatron.zero_bubble.session.layout_choice import is_layout_open, megatrons_layout_flags
from megatron.zero_bubble.trainer.model_checks import check_fully_sharded

SMALL_JOB = 1000
"""Smallest product of pipeline ranks and microbatches for which schedules are estimated in several processes."""
LARGE_JOB = 2000
"""Smallest product of pipeline ranks and microbatches for which schedules are planned with little search effort,
unless --schedule names the schedules."""
_LAYOUT, _FREED = "layout", "layout without Megatron's flags"
"""Keys of the two layout searches in dictionaries whose other keys are names of schedules."""
_FLAGS_OF: dict[Recompute, Mapping[str, Any]] = {
    Recompute.FULL: FULL_RECOMPUTATION,
    Recompute.PLANNED: {
        "zero_bubble": True,
        "zero_bubble_memory_limit": "auto",
        "zero_bubble_recompute": Recompute.PLANNED.value,
    },
}
"""Kind of recomputation with which a job may fit in memory -> flags of this kind of recomputation."""
_NO_RECOMPUTATION: dict[str, Any] = dict.fromkeys((*RECOMPUTATION, "zero_bubble_recompute"))


class Remedy(NamedTuple):
    """An estimate with another layout or with recomputation, for a job whose own schedules do not fit in memory."""

    flags: str
    """The flags that replace the job's own flags for layout or recomputation in this estimate."""
    best: Estimate
    """The fastest schedule that fits with `flags` or, if no schedule fits, the schedule with the least memory."""
    slowdown: float
    """Iteration time of `best`, divided by the shortest iteration time of the job's own schedules, which do not fit."""


@dataclass(frozen=True)
class Results:
    """The estimates of a job's schedules and layouts."""

    job: EstimatedJob
    estimates: list[Estimate]
    refused: dict[str, str]
    """Name of a schedule or of a layout search -> reason why its estimate is not possible."""
    layout: LayoutEstimate | None = None
    """The layout that the training would choose; None if the flags fix a layout, or no layout is possible."""
    freed: LayoutEstimate | None = None
    """The layout that a job would choose without Megatron's layout flags; None if the job has no such flags, or no
    layout is possible."""
    remedies: Sequence[Remedy] = ()
    """Estimates with other layouts and with recomputation; empty if one of the job's schedules fits in memory."""
    added_flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags that Megatron needs to divide the layers among stages; the schedules are estimated with these flags."""

    @property
    def plain_1f1b(self) -> Estimate | None:
        return next((each for each in self.estimates if each.schedule.name == "1f1b"), None)

    @cached_property
    def baseline(self) -> Estimate | None:
        """The estimate of megatron-core's own 1F1B if `1f1b` is among the schedules."""
        return None if self.plain_1f1b is None else as_megatron_runs(self.plain_1f1b)

    @property
    def nothing_fits(self) -> bool:
        return bool(self.estimates) and not any(each.fits for each in self.estimates)

    @property
    def refused_by_reason(self) -> dict[str, list[str]]:
        """Reason for a refusal -> names of the refused schedules and layout searches."""
        names: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            names.setdefault(reason, []).append(name)
        return names


def results_of(job: EstimatedJob, chosen: Sequence[str] | None) -> Results:
    """Estimate the schedules named in `chosen`, and the layout that the training would choose.

    If `chosen` is None, the function estimates all schedules that are not slow to generate.

    Raises:
        ValueError: the name of a schedule is unknown, or neither a schedule nor a layout is possible.
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
        messages = []
        for reason, refused in results.refused_by_reason.items():
            schedules = ", ".join(name for name in refused if name in ENTRIES)
            messages.append(f"--schedule {schedules}: {reason}" if schedules else reason)
        raise ValueError("; ".join(messages))
    return replace(results, remedies=list(_remedies(results)))


def _size(job: EstimatedJob) -> int:
    return job.flags.pipeline_model_parallel_size * job.flags.most_microbatches


def _even_ends(job: EstimatedJob) -> dict[str, Any]:
    """Return the flags with which Megatron divides a number of layers that is not a multiple of the pipeline size."""
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    for given in (ends, ends[:1], ends[1:]):
        if (job.flags.num_layers + len(given)) % job.flags.pipeline_model_parallel_size == 0:
            return dict.fromkeys(given, True)
    return {"allow_padding_num_layers": True}


def _estimated(job: EstimatedJob, names: Sequence[str], *, frees_layout: bool = False) -> Results:
    """Estimate the schedules in `names` and, if the flags leave the layout open, the layout that the planner chooses.

    If `frees_layout` is set, the results also contain the layout that a training job would choose without Megatron's
    layout flags.
    """
    for name in names:
        entry_of(name)
    tasks: dict[str, Callable[[], Estimate]] = {}
    # Layouts come first, because their search takes longer than any schedule.
    if frees_layout:
        tasks[_FREED] = partial(estimate_layout, job, frees_layout=True)
    if is_layout_open(job.flags):
        tasks[_LAYOUT] = partial(estimate_layout, job)
    tasks |= {name: partial(estimate, job, name) for name in names}
    num_processes = 1
    if _size(job) >= SMALL_JOB and hasattr(os, "sched_getaffinity"):  # only Linux has this function, and forks safely
        num_processes = min(len(os.sched_getaffinity(0)), len(tasks))
    if num_processes == 1:
        outcomes = list(map(_outcome, tasks.values()))
    else:
        with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork")) as processes:
            outcomes = list(processes.map(_outcome, tasks.values()))
    named = dict(zip(tasks, outcomes, strict=True))
    refused = {name: each for name, each in named.items() if isinstance(each, str)}
    done = {name: each for name, each in named.items() if isinstance(each, Estimate)}
    layout, freed = (cast("LayoutEstimate | None", done.pop(name, None)) for name in (_LAYOUT, _FREED))
    return Results(job, list(done.values()), refused, layout, freed)


def _outcome(task: Callable[[], Estimate]) -> Estimate | str:
    """Return the estimate that `task` computes, or the error message if no estimate is possible."""
    try:
        answer = task()
    except ValueError as error:
        return str(error)
    assert answer.iteration_ms > 0, "the times must be computed in this process"
    return answer


def _remedies(results: Results) -> Iterator[Remedy]:
    """Yield estimates with another layout or with recomputation, if none of the job's schedules fits in memory."""
    if not results.nothing_fits:
        return
    job, estimates, layout = results.job, results.estimates, results.layout
    fastest = min(each.iteration_ms for each in estimates)
    if layout is not None:
        yield Remedy(flags_text(layout.layout_flags), layout, layout.iteration_ms / fastest)
        return
    if job.profile is not None:  # the profile of a run without recomputation has no costs of recomputation
        return
    for kind, flags in _FLAGS_OF.items():
        other_job = job.with_flags({**_NO_RECOMPUTATION, **flags})
        if kind is job.flags.recompute or not _is_trainable(other_job):
            continue
        names = ["auto"] if kind is Recompute.PLANNED else [each.schedule.name for each in estimates]
        other = _estimated(other_job, names)
        possible = [*other.estimates, *([] if other.layout is None else [other.layout])]
        if possible:
            best = min(possible, key=lambda each: (0, each.iteration_ms) if each.fits else (1, max(each.total_bytes)))
            yield Remedy(flags_text(flags), best, best.iteration_ms / fastest)


def _is_trainable(job: EstimatedJob) -> bool:
    """Whether the trainer accepts the recomputation of a job together with the job's other flags."""
    try:
        check_fully_sharded(job.args)
    except ValueError:
        return False
    return job.flags.recompute is not Recompute.PLANNED or works_with(job.flags, Feature.PLANNED_RECOMPUTATION)
