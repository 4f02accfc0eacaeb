"""Explains the figures of `zero-bubble estimate` in notes of one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.results import Results
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, gib
from megatron.zero_bubble.planner.layouts import SIMPLER
from megatron.zero_bubble.session.flags import flags_text, limit_flag
from megatron.zero_bubble.session.layout_choice import megatrons_layout_flags
from megatron.zero_bubble.session.layout_words import gain_words

_WHAT_IS_LEFT = "nine tenths of the free memory of the fullest rank"


def notes(results: Results) -> list[str]:
    job, estimates = results.job, results.estimates
    return [
        *_split(results),
        *_freed(results),
        *_ways_out(results),
        *_limits(job, estimates),
        *(
            ["planned with little effort: --schedule NAME plans a large job as its training will"]
            if job.is_quick
            else []
        ),
        *_overlap(job, estimates),
        *_baseline(job, estimates),
        *_post_validation(job, estimates),
    ]


def _split(results: Results) -> Iterator[str]:
    if results.added_flags:
        args = results.job.args
        yield (
            f"--num-layers {args.num_layers} is not a multiple of --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}: schedules on Megatron's split are estimated with "
            f"{flags_text(results.added_flags)}, with which Megatron runs it"
        )


def _freed(results: Results) -> Iterator[str]:
    """The layout that the training would choose if Megatron's flags did not fix one."""
    if results.freed is None:
        return
    given = " ".join(megatrons_layout_flags(results.job.flags))
    choice, own = results.freed.choice, results.freed.choice.megatrons
    kept = None if results.layout is None else results.layout.choice.plan.time
    if choice.is_megatrons_split or not own or (kept is not None and kept <= SIMPLER * choice.plan.time):
        yield f"no layout is predicted to be 2% faster than with {given}"
        return
    yield (
        f"without {given} --zero-bubble would choose another layout, {gain_words(choice.plan, own)}: "
        f"{flags_text(results.freed.flags)}"
    )


def _ways_out(results: Results) -> Iterator[str]:
    if not results.estimates or any(estimate.fits for estimate in results.estimates):
        return
    if results.job.profile is not None and results.layout is None:
        yield "nothing fits; a profile does not say what recomputation would take: leave out --profile to estimate it"
    for way in results.ways_out:
        name, needed = way.best.timeline.schedule.name, way.best.memory_text
        if way.best.fits:
            cost = f"takes {way.slowdown:.3f} times as long as the fastest above would with enough memory"
            yield f"nothing fits, but with {way.flags} {name} does ({needed}) and {cost}"
        else:
            yield f"with {way.flags} nothing fits either: {name} needs {needed}"
    if not any(way.best.fits for way in results.ways_out):
        smaller = "--tensor-model-parallel-size or --pipeline-model-parallel-size, or a smaller --micro-batch-size"
        yield f"less memory is needed with --use-distributed-optimizer, a larger {smaller}"


def _limits(job: EstimatedJob, estimates: Sequence[Estimate]) -> Iterator[str]:
    for estimate in estimates:
        if estimate.limit is None:
            continue
        name, limit = estimate.timeline.schedule.name, gib(max(0.0, estimate.limit))
        if estimate.is_over_limit:
            least = gib(max(estimate.activation_bytes))
            yield f"{name}: needs at least {least} GiB of activations, and gets {limit}, {_source(job)}"
        else:
            yield f"{name}: planned for {limit} GiB of activations, {_source(job)}"


def _source(job: EstimatedJob) -> str:
    flags, limit = job.flags, job.flags.memory_limit
    if limit is None:
        return "the peak of megatron-core's own schedule, as a training with --zero-bubble has by default"
    if limit.is_auto:
        return f"{_WHAT_IS_LEFT}, by {limit_flag(flags)}"
    if flags.zero_bubble_memory_limit is None:
        interleaved = "interleaved-pairs" if limit.pairs else "interleaved 1F1B"
        baseline = interleaved if limit.is_interleaved else "1F1B"
        return f"{baseline}'s peak, by {limit_flag(flags)}; the limit auto would be {_WHAT_IS_LEFT}"
    return f"by {limit_flag(flags)}"


def _overlap(job: EstimatedJob, estimates: Sequence[Estimate]) -> Iterator[str]:
    for estimate in estimates:
        if estimate.gain_of_pairs is not None:
            yield (
                f"{estimate.timeline.schedule.name}: --overlap-moe-expert-parallel-comm makes it "
                f"{estimate.gain_of_pairs:.3f} times as fast"
            )


def _baseline(job: EstimatedJob, estimates: Sequence[Estimate]) -> Iterator[str]:
    ours = next((estimate for estimate in estimates if estimate.timeline.schedule.name == "1f1b"), None)
    if ours is None:
        return
    if ours.timeline.schedule.recomputes:
        yield "to 1F1B: to megatron-core's own, which recomputes within its backward; 1f1b here recomputes ahead of it"
    if job.flags.vocabulary_parallel:
        yield "to 1F1B: to megatron-core's own, without vocabulary shards; all schedules here have them"


def _post_validation(job: EstimatedJob, estimates: Sequence[Estimate]) -> Iterator[str]:
    if not job.args.zero_bubble_post_validation:
        return
    reasons = (job.awaited(estimate.timeline.schedule.placement) for estimate in estimates)
    for reason in {reason: None for reason in reasons if reason is not None}:
        waiting = f"the first stage waits for the last, because {reason}"
        yield f"--zero-bubble-post-validation gains nothing, except in a V: {waiting}"
