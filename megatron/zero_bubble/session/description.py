"""Prints a job's start-up lines: the parameters, the deferred weight gradients, the schedule and the hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from megatron.core import parallel_state

from megatron.zero_bubble.mcore.linear import Gradients, count_gradients
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.session.environment import describe_hosts, environment_warnings, host_name
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import layers_of_layout
from megatron.zero_bubble.session.reports import ModelRank, deferred_line, parameter_line, print_rank_0, unsplit_line
from megatron.zero_bubble.session.settings import JobSettings


def describe(job: JobSettings, model: list[torch.nn.Module]) -> None:
    """Print the start-up lines of the job on rank 0; a collective call.

    The lines state the number of parameters, the share of deferred weight gradients, the schedule and the hosts.

    Raises:
        ValueError: a module computes in B a weight gradient that it could defer to W, and `--zero-bubble-no-strict` is
            not set. With `--zero-bubble-strict`, any module that `unsplit_modules` returns also raises the error. All
            ranks raise the error.
    """
    flags, plan = job.flags, job.plan
    ranks = _gather(count_gradients(model))
    print_rank_0(parameter_line(ranks))
    if plan is not None:
        unsplit = unsplit_modules(ranks)
        for line in (deferred_line(ranks), *(unsplit_line(name, share) for name, share in unsplit.items())):
            print_rank_0(line)
        _refuse_unsplit(flags, ranks, unsplit)
    if flags.overlap_moe_expert_parallel_comm and flags.vocabulary_parallel:
        print_rank_0(
            " > --overlap-moe-expert-parallel-comm: no F and B run as one operation, because the vocabulary is sharded"
        )
    if flags.pipeline_model_parallel_layout is not None:
        layers = layers_of_layout(flags.pipeline_model_parallel_layout, flags.pipeline_model_parallel_size)
        print_rank_0(f" > layers of each stage: {', '.join(map(str, layers))}")
    if flags.pattern is not None and flags.pattern.is_divided:
        print_rank_0(f" > layers of each stage: {' | '.join(flags.pattern.stages)}")
    chunks = f", {len(model)} model chunks a rank" if len(model) > 1 else ""
    megatrons = "megatron-core (interleaved 1F1B)" if len(model) > 1 else "megatron-core (1F1B)"
    print_rank_0(f" > pipeline schedule: {plan.name if plan else megatrons}{chunks}")
    for warning in environment_warnings(flags, os.environ, torch.cuda.is_available()):
        print_rank_0(f" > WARNING: {warning}")
    own_place = parallel_state.get_pipeline_model_parallel_rank(), host_name(os.environ)
    pipeline_ranks, hosts = zip(*from_all_ranks(own_place), strict=True)
    if len(set(hosts)) > 1:
        for line in describe_hosts(job.placement, pipeline_ranks, hosts):
            print_rank_0(f" > {line}")


def unsplit_modules(ranks: Mapping[ModelRank, Gradients]) -> dict[str, float]:
    """Return the modules whose weight gradients stay in B: name of the module -> its share of a rank's parameters.

    If the share of a module differs between ranks, the function returns the largest share.
    """
    shares: dict[str, float] = {}
    for gradients in ranks.values():
        for name, size in gradients.unsplit:
            shares[name] = max(shares.get(name, 0.0), size / gradients.total)
    return dict(sorted(shares.items()))


def _refuse_unsplit(flags: JobFlags, ranks: Mapping[ModelRank, Gradients], unsplit: Mapping[str, float]) -> None:
    if flags.zero_bubble_strict and unsplit:
        raise ValueError(
            f"--zero-bubble-strict: weight gradients of {', '.join(unsplit)} cannot be deferred to W: "
            "train without that module, or without --zero-bubble-strict"
        )
    missed = sorted({name for gradients in ranks.values() for name in gradients.missed})
    if missed and not flags.zero_bubble_no_strict:
        raise ValueError(
            f"W is not deferred for {', '.join(missed)}: train without that module, or with --zero-bubble-no-strict, "
            "which leaves its W in B"
        )


def _gather(gradients: Gradients) -> dict[ModelRank, Gradients]:
    """Gather the gradient counts of all tensor-parallel and pipeline ranks on every rank; a collective call."""
    rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    return dict(sorted(from_all_ranks((rank, gradients)), key=lambda entry: entry[0]))
