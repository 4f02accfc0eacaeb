"""Formats the results of `zero-bubble estimate` as tables with one-line notes, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.zero_bubble.cli.estimate.results import Results
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, gib
from megatron.zero_bubble.cli.output import percent, table, table_of
from megatron.zero_bubble.planner.choice import SIMPLER
from megatron.zero_bubble.schedule.host_link import offloaded_share
from megatron.zero_bubble.session.features import awaited_by_the_first_stage
from megatron.zero_bubble.session.flags import flags_text, limit_flag
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layout_choice import megatrons_layout_flags
from megatron.zero_bubble.session.layout_words import gain_words
from megatron.zero_bubble.session.reports import layout_lines

_FREE_MEMORY = "nine tenths of the free memory of the fullest rank"


def as_json(results: Results) -> dict[str, Any]:
    shown = _shown(results)
    job, placement = shown.job, shown.schedule.placement
    return {
        "parameters": sum(unit.whole for unit in job.count.units),
        "parameters_of_prediction_layers": job.count.output.further,
        "parameters_per_rank": [sum(parameters) for parameters in job.parameters(placement)],
        "bytes_a_parameter": job.states.bytes_a_parameter(job.replicas.dense),
        "zero_stage": job.states.zero_stage,
        "bytes_sent_to_replicas": job.exchanged_bytes(placement),
        "num_microbatches": job.flags.most_microbatches,
        "flops_per_iteration": job.flops_per_iteration,
        "flops_of_a_microbatch": job.flops(placement)._asdict(),
        "device_memory_bytes": job.cluster.device_memory,
        "schedules": [each.as_json(results.baseline) for each in results.estimates],
        "layout": None if results.layout is None else results.layout.as_json(),
        "freed_layout": None if results.freed is None else results.freed.as_json(),
        "refused": results.refused,
        "ways_out": [
            {
                "flags": remedy.flags,
                "schedule": remedy.best.schedule.name,
                "fits": remedy.best.fits,
                "bytes": max(remedy.best.total_bytes),
                "time": remedy.slowdown,
            }
            for remedy in results.remedies
        ],
        "notes": notes(results),
    }


def as_text(results: Results, *, per_rank: bool, markdown: bool) -> str:
    parts = [_lines(_head(_shown(results)))]
    if results.estimates:
        parts.append(_schedules(results, markdown=markdown))
    if per_rank:
        parts.append(_ranks(results.estimates, markdown=markdown))
    parts += [f"{note}\n" for note in notes(results)]
    parts += [f"{', '.join(names)}: {reason}\n" for reason, names in results.refused_by_reason.items()]
    if results.layout is not None:
        parts.append(_lines(layout_lines(results.layout.choice, results.layout.layout_flags)))
    return "\n".join(parts)


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _shown(results: Results) -> Estimate:
    """Return the estimate of the first schedule or, if no schedule has an estimate, of the chosen layout."""
    shown = results.estimates[0] if results.estimates else results.layout
    assert shown is not None
    return shown


def _head(shown: Estimate) -> Iterator[str]:
    job, placement = shown.job, shown.schedule.placement
    states, replicas, optimizer = job.states, job.replicas, {"adam": "Adam", "sgd": "SGD"}[job.flags.optimizer]
    of_ranks, flops = job.parameters(placement), job.flops(placement)
    counts, has_experts = [sum(parameters) for parameters in of_ranks], any(own.expert for own in of_ranks)
    whole, further = sum(unit.whole for unit in job.count.units), job.count.output.further
    yield (
        f"parameters of a rank: {min(counts) / 1e6:.1f} to {max(counts) / 1e6:.1f} million, "
        f"{whole / 1e9:.3f} billion in all{f', and {further / 1e9:.3f} of prediction layers' if further else ''}"
    )
    yield (
        f"bytes a parameter: {states.parameter} + {states.gradient} for its gradient + {states.optimizer} for "
        f"{optimizer}; ZeRO stage {states.zero_stage} over {replicas.dense} data- and "
        f"context-parallel ranks leaves {states.bytes_a_parameter(replicas.dense):.4g}"
        + (
            f"; of experts over {replicas.expert}: {states.bytes_a_parameter(replicas.expert):.4g}"
            if has_experts
            else ""
        )
    )
    if max(replicas) > 1:
        gradients, parameters = states.passes(job.flags.most_microbatches)
        sent = job.exchanged_bytes(placement)
        yield (
            f"replicas: each sends {gib(min(sent))} to {gib(max(sent))} GiB an iteration to the others, gradients "
            f"{gradients} times and parameters {parameters} times round the ring"
        )
    yield (
        f"operations of an iteration: {job.flops_per_iteration:.4g}; of a microbatch on a tensor-parallel rank "
        f"F : B : W{' : R' if flops.r else ''} = "
        + " : ".join(["1", *(f"{part / flops.f:.3f}" for part in flops[1:] if part)])
    )
    costs = "measured (--profile)" if job.profile else f"{job.cluster.flops / 1e12:.4g} TFLOP/s in the layers"
    is_early = job.flags.zero_bubble_post_validation
    waiting = "steps before the norm of all gradients is known" if is_early else "waits for the norm of all gradients"
    yield f"costs: {costs}; {job.flags.most_microbatches} microbatches; the optimizer {waiting}"


def _schedules(results: Results, *, markdown: bool) -> str:
    columns: dict[str, Callable[[Estimate], str]] = {
        "schedule": lambda each: each.schedule.name,
        "chunks": lambda each: str(each.schedule.num_chunks),
        "states (GiB)": lambda each: gib(each.state_bytes[each.fullest]),
        "activations": lambda each: gib(each.activation_bytes[each.fullest]),
        "in all": lambda each: gib(each.total_bytes[each.fullest]),
        "fits": lambda each: "yes" if each.fits else f"no: {each.memory_text}",
        "idle": lambda each: percent(each.timeline.idle.total),
        "imbalance": lambda each: percent(each.timeline.idle.imbalance),
        "bubble": lambda each: percent(each.timeline.idle.bubble),
        "iteration (ms)": lambda each: f"{each.iteration_ms:.1f}",
        "tokens/s/GPU": lambda each: f"{each.tokens_per_second:.0f}",
        "TFLOP/s/GPU": lambda each: f"{each.tflops:.4g}",
        "to 1F1B": lambda each: f"{results.baseline.iteration_ms / each.iteration_ms:.3f}" if results.baseline else "",
    }
    if any(each.schedule.offloads for each in results.estimates):
        columns["offloaded"] = lambda each: percent(offloaded_share(each.schedule))
        columns["host (GiB)"] = lambda each: gib(max(each.host_bytes))
    return table_of(columns, results.estimates, markdown=markdown)


def _ranks(estimates: list[Estimate], *, markdown: bool) -> str:
    rows = [
        (f"{each.schedule.name}, rank {rank}", *map(gib, memory))
        for each in estimates
        for rank, memory in enumerate(zip(each.state_bytes, each.activation_bytes, each.total_bytes, strict=True))
    ]
    return table(("schedule", "states (GiB)", "activations", "in all"), rows, markdown=markdown)


def notes(results: Results) -> list[str]:
    """Return one-line notes that explain the numbers of the estimate."""
    job = results.job
    lines = [*_on_layouts(results), *_remedies(results)]
    lines += [_limit(each, each.limit) for each in results.estimates if each.limit is not None]
    if job.is_quick:
        lines.append("planned with little effort: --schedule NAME plans a large job as its training will")
    lines += [
        f"{each.schedule.name}: --overlap-moe-expert-parallel-comm makes it {each.gain_of_pairs:.3f} times as fast"
        for each in results.estimates
        if each.gain_of_pairs is not None
    ]
    if results.plain_1f1b is not None:
        own = "to 1F1B: to megatron-core's own, "
        if results.plain_1f1b.schedule.recomputes:
            lines.append(f"{own}which recomputes within its backward; 1f1b here recomputes before the backward")
        if job.flags.vocabulary_parallel:
            lines.append(f"{own}without vocabulary shards; all schedules here have them")
    if job.flags.zero_bubble_post_validation:
        awaited = {awaited_by_the_first_stage(job.flags, each.schedule.placement) for each in results.estimates} - {
            None
        }
        nothing = "--zero-bubble-post-validation gains nothing, except in a V: the first stage waits for the last"
        lines += [f"{nothing}, because {reason}" for reason in awaited]
    return lines


def _on_layouts(results: Results) -> Iterator[str]:
    flags = results.job.flags
    if results.added_flags:
        yield (
            f"--num-layers {flags.num_layers} is not a multiple of --pipeline-model-parallel-size "
            f"{flags.pipeline_model_parallel_size}: schedules on Megatron's split are estimated with "
            f"{flags_text(results.added_flags)}, with which Megatron runs it"
        )
    if results.freed is not None:
        given = " ".join(megatrons_layout_flags(flags))
        choice, own = results.freed.choice, results.freed.choice.megatrons
        kept = None if results.layout is None else results.layout.choice.plan.time
        if choice.is_megatrons_split or not own or (kept is not None and kept <= SIMPLER * choice.plan.time):
            yield f"no layout is predicted to be 2% faster than with {given}"
        else:
            yield (
                f"without {given} --zero-bubble would choose another layout (relative speed "
                f"{gain_words(choice.plan, own)}): {flags_text(results.freed.layout_flags)}"
            )


def _remedies(results: Results) -> Iterator[str]:
    if not results.nothing_fits:
        return
    if results.job.profile is not None and results.layout is None:
        yield "nothing fits; a profile has no costs of recomputation: leave out --profile to estimate recomputation"
    for remedy in results.remedies:
        name, needed = remedy.best.schedule.name, remedy.best.memory_text
        if remedy.best.fits:
            cost = f"takes {remedy.slowdown:.3f} times as long as the fastest above would with enough memory"
            yield f"nothing fits, but with {remedy.flags} {name} does ({needed}) and {cost}"
        else:
            yield f"with {remedy.flags} nothing fits either: {name} needs {needed}"
    if not any(remedy.best.fits for remedy in results.remedies):
        smaller = "--tensor-model-parallel-size or --pipeline-model-parallel-size, or a smaller --micro-batch-size"
        yield f"less memory is needed with --use-distributed-optimizer, a larger {smaller}"


def _limit(planned: Estimate, limit: float) -> str:
    """Return a line that states the memory limit under which a schedule was planned."""
    name, allowed, source = planned.schedule.name, gib(max(0.0, limit)), _source(planned.job.flags)
    if planned.is_over_limit:
        least = gib(max(planned.activation_bytes))
        return f"{name}: needs at least {least} GiB of activations, and gets {allowed}, {source}"
    return f"{name}: planned for {allowed} GiB of activations, {source}"


def _source(flags: JobFlags) -> str:
    limit = flags.memory_limit
    if limit is None:
        return "the peak of megatron-core's own schedule, as a job with --zero-bubble has by default"
    if flags.zero_bubble_memory_limit is not None:
        return f"{_FREE_MEMORY}, by {limit_flag(flags)}" if limit.is_auto else f"by {limit_flag(flags)}"
    interleaved = "interleaved-pairs" if limit.pairs else "interleaved 1F1B"
    baseline = interleaved if limit.is_interleaved else "1F1B"
    return f"{baseline}'s peak, by {limit_flag(flags)}; the limit auto would be {_FREE_MEMORY}"
