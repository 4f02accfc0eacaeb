"""Formats the results of `zero-bubble estimate` as tables, notes of one line each, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.results import Results, by_reason
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, as_megatron_runs, gib
from megatron.zero_bubble.cli.output import IDLE_HEADS, idle_cells, percent, table
from megatron.zero_bubble.planner.choice import SIMPLER
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.flags import flags_text, limit_flag
from megatron.zero_bubble.session.layout_choice import megatrons_layout_flags
from megatron.zero_bubble.session.layout_words import gain_words

_WHAT_IS_LEFT = "nine tenths of the free memory of the fullest rank"


def as_json(results: Results) -> dict[str, Any]:
    job, estimates = results.job, results.estimates
    states = job.states
    baseline = _baseline(estimates)
    shown, placement = results.shown
    return {
        "parameters": sum(unit.whole for unit in job.count.units),
        "parameters_of_prediction_layers": job.count.output.further,
        "parameters_per_rank": [sum(parameters) for parameters in shown.parameters(placement)],
        "bytes_a_parameter": states.bytes_a_parameter(job.replicas),
        "zero_stage": states.zero_stage,
        "bytes_sent_to_replicas": shown.exchanged_bytes(placement),
        "num_microbatches": job.num_microbatches,
        "flops_per_iteration": job.flops_per_iteration,
        "flops_of_a_microbatch": shown.flops(placement)._asdict(),
        "device_memory_bytes": job.cluster.device_memory,
        "schedules": [estimate.as_json(baseline) for estimate in estimates],
        "layout": None if results.layout is None else results.layout.as_json(),
        "freed_layout": None if results.freed is None else results.freed.as_json(),
        "refused": results.refused,
        "ways_out": [way.as_json() for way in results.ways_out],
        "notes": notes(results),
    }


def as_text(results: Results, *, per_rank: bool, markdown: bool) -> str:
    parts = [_head(*results.shown), *([_schedules(results.estimates, markdown=markdown)] if results.estimates else [])]
    if per_rank:
        parts.append(_ranks(results.estimates, markdown=markdown))
    parts += [f"{note}\n" for note in notes(results)]
    parts += [f"{', '.join(names)}: {reason}\n" for reason, names in by_reason(results.refused).items()]
    if results.layout is not None:
        parts.append("".join(f"{line}\n" for line in results.layout.lines()))
    return "\n".join(parts)


def _plain_1f1b(estimates: Sequence[Estimate]) -> Estimate | None:
    return next((estimate for estimate in estimates if estimate.timeline.schedule.name == "1f1b"), None)


def _baseline(estimates: Sequence[Estimate]) -> Estimate | None:
    """Return the estimate of megatron-core's own 1F1B if `1f1b` is among the schedules."""
    ours = _plain_1f1b(estimates)
    return ours and as_megatron_runs(ours)


def _head(job: EstimatedJob, placement: Placement) -> str:
    args, cluster, states = job.args, job.cluster, job.states
    counts, flops = [sum(parameters) for parameters in job.parameters(placement)], job.flops(placement)
    whole, further = sum(unit.whole for unit in job.count.units), job.count.output.further
    costs = "measured (--profile)" if job.profile is not None else f"{cluster.flops / 1e12:.4g} TFLOP/s in the layers"
    waiting = (
        "steps before the norm of all gradients is known"
        if args.zero_bubble_post_validation
        else "waits for the norm of all gradients"
    )
    optimizer = {"adam": "Adam", "sgd": "SGD"}[args.optimizer]
    lines = [
        f"parameters of a rank: {min(counts) / 1e6:.1f} to {max(counts) / 1e6:.1f} million, "
        f"{whole / 1e9:.3f} billion in all{f', and {further / 1e9:.3f} of prediction layers' if further else ''}",
        f"bytes a parameter: {states.parameter} + {states.gradient} for its gradient + {states.optimizer} for "
        f"{optimizer}; ZeRO stage {states.zero_stage} over {job.replicas} data- and context-parallel ranks leaves "
        f"{states.bytes_a_parameter(job.replicas):.4g}",
        *_exchanged(job, placement),
        f"operations of an iteration: {job.flops_per_iteration:.4g}; of a microbatch on a "
        f"tensor-parallel rank F : B : W{' : R' if flops.r else ''} = "
        + " : ".join(["1", *(f"{part / flops.f:.3f}" for part in flops[1:] if part)]),
        f"costs: {costs}; {job.num_microbatches} microbatches; the optimizer {waiting}",
    ]
    return "\n".join(lines) + "\n"


def _exchanged(job: EstimatedJob, placement: Placement) -> list[str]:
    """Return the line on what replicas send each other, if there are several."""
    if job.replicas == 1:
        return []
    gradients, parameters = job.states.passes(job.num_microbatches)
    sent = job.exchanged_bytes(placement)
    return [
        f"replicas: each sends {gib(min(sent))} to {gib(max(sent))} GiB an iteration to the others, gradients "
        f"{gradients} times and parameters {parameters} times round the ring"
    ]


def _schedules(estimates: list[Estimate], *, markdown: bool) -> str:
    heads: tuple[str, ...] = (
        *("schedule", "chunks", "states (GiB)", "activations", "in all", "fits"),
        *(*IDLE_HEADS, "iteration (ms)", "tokens/s/GPU", "TFLOP/s/GPU", "to 1F1B"),
    )
    baseline = _baseline(estimates)
    rows: list[tuple[str, ...]] = []
    for estimate in estimates:
        fullest = estimate.total_bytes.index(max(estimate.total_bytes))
        rows.append(
            (
                estimate.timeline.schedule.name,
                str(estimate.timeline.schedule.num_chunks),
                gib(estimate.state_bytes[fullest]),
                gib(estimate.activation_bytes[fullest]),
                gib(estimate.total_bytes[fullest]),
                "yes" if estimate.fits else f"no: {estimate.memory_text}",
                *idle_cells(estimate.timeline.idle),
                f"{estimate.iteration_ms:.1f}",
                f"{estimate.tokens_per_second:.0f}",
                f"{estimate.tflops:.4g}",
                "" if baseline is None else f"{baseline.iteration_ms / estimate.iteration_ms:.3f}",
            )
        )
    if any(estimate.timeline.schedule.offloads for estimate in estimates):
        heads = (*heads, "offloaded", "host (GiB)")
        rows = [
            (*row, percent(estimate.offloaded), gib(max(estimate.host_bytes)))
            for row, estimate in zip(rows, estimates, strict=True)
        ]
    return table(heads, rows, markdown=markdown)


def _ranks(estimates: list[Estimate], *, markdown: bool) -> str:
    rows = [
        (f"{estimate.timeline.schedule.name}, rank {rank}", *map(gib, figures))
        for estimate in estimates
        for rank, figures in enumerate(
            zip(estimate.state_bytes, estimate.activation_bytes, estimate.total_bytes, strict=True)
        )
    ]
    return table(("schedule", "states (GiB)", "activations", "in all"), rows, markdown=markdown)


def notes(results: Results) -> list[str]:
    """Explain the figures, in one line each."""
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
        *_on_baseline(job, estimates),
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


def _on_baseline(job: EstimatedJob, estimates: Sequence[Estimate]) -> Iterator[str]:
    ours = _plain_1f1b(estimates)
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
