"""Formats the results of `zero-bubble estimate` as tables and as JSON."""

from __future__ import annotations

from typing import Any

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.cli.estimate.notes import notes
from megatron.zero_bubble.cli.estimate.results import Results, by_reason
from megatron.zero_bubble.cli.estimate.schedule_estimate import Estimate, as_megatron_runs, gib
from megatron.zero_bubble.cli.output import IDLE_HEADS, idle_cells, table
from megatron.zero_bubble.schedule import Placement


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


def _baseline(estimates: list[Estimate]) -> Estimate | None:
    """Return the estimate of megatron-core's own 1F1B if `1f1b` is among the schedules."""
    ours = next((estimate for estimate in estimates if estimate.timeline.schedule.name == "1f1b"), None)
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
    heads = (
        *("schedule", "chunks", "states (GiB)", "activations", "in all", "fits"),
        *(*IDLE_HEADS, "iteration (ms)", "tokens/s/GPU", "TFLOP/s/GPU", "to 1F1B"),
    )
    baseline = _baseline(estimates)
    rows = []
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
