"""Explains the figures of `zero-bubble estimate` in notes of one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate
from megatron.zero_bubble.job.flags import limit_flag

_WHAT_IS_LEFT = "nine tenths of the free memory of the fullest rank"


def notes(job: EstimatedJob, found: Sequence[Estimate]) -> list[str]:
    return [*_limits(job, found), *_recomputation(found), *_post_validation(job, found)]


def _limits(job: EstimatedJob, found: Sequence[Estimate]) -> Iterator[str]:
    for one in found:
        if one.limit is not None:
            planned = f"{one.timeline.schedule.name}: planned for {one.limit / 2**30:.2f} GiB of activations"
            yield f"{planned}, {_source(job)}"


def _source(job: EstimatedJob) -> str:
    flags, limit = job.flags, job.flags.memory_limit
    if limit is None:
        return f"{_WHAT_IS_LEFT}, as a training with --zero-bubble --zero-bubble-memory-limit auto has"
    if limit.is_auto:
        return f"{_WHAT_IS_LEFT}, by {limit_flag(flags)}"
    if flags.zero_bubble_memory_limit is None:
        baseline = "interleaved 1F1B" if limit.is_interleaved else "1F1B"
        return f"{baseline}'s peak, by {limit_flag(flags)}; the limit auto would be {_WHAT_IS_LEFT}"
    return f"by {limit_flag(flags)}"


def _recomputation(found: Sequence[Estimate]) -> Iterator[str]:
    if any(one.timeline.schedule.name == "1f1b" and one.timeline.schedule.recomputes for one in found):
        yield "to 1F1B: to megatron-core's own, which recomputes within its backward; 1f1b here recomputes ahead of it"


def _post_validation(job: EstimatedJob, found: Sequence[Estimate]) -> Iterator[str]:
    if not job.args.zero_bubble_post_validation:
        return
    reasons = (job.awaited(one.timeline.schedule.placement) for one in found)
    for reason in {reason: None for reason in reasons if reason is not None}:
        waiting = f"the first stage waits for the last, because {reason}"
        yield f"--zero-bubble-post-validation gains nothing, except in a V: {waiting}"
