"""Estimates the memory and the throughput of one schedule from a model, a cluster and a placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from megatron.zero_bubble.cli.estimate.cluster import rank_parameters, stages_of
from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.job.model_states import element_bytes
from megatron.zero_bubble.planner import PlanRequest, placement_for, schedule_of
from megatron.zero_bubble.planner.memory_limit import MemoryLimit
from megatron.zero_bubble.planner.prediction import as_megatron_recomputes
from megatron.zero_bubble.planner.registry import entry_of
from megatron.zero_bubble.planner.request import EFFORT, QUICK_EFFORT
from megatron.zero_bubble.runtime.replanner import MARGIN, limits_of_ranks
from megatron.zero_bubble.schedule import (
    Infeasible,
    Placement,
    ScheduleError,
    StageCosts,
    Timeline,
    iteration_time,
    simulate,
    with_post_validation,
)
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.ir import PlacementKind
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.training.flops import flops_per_iteration
from megatron.zero_bubble.training.model_size import StageLayers, stage_parameters
from megatron.zero_bubble.training.stage_size import Flops, stage_activations, stage_flops

_SHORTEST = 1e-3
"""Shortest duration of an operation, in milliseconds."""


@dataclass(frozen=True)
class Estimate:
    """The estimate of one schedule; times are in milliseconds, memory is in bytes for each pipeline rank."""

    job: EstimatedJob
    timeline: Timeline
    state_bytes: tuple[float, ...]
    limit: float | None = None
    """Bytes of activations a rank that the schedule may take; None if it was planned without a limit.

    A schedule takes more only if `auto` has less than its smallest plan needs.
    """

    @property
    def activation_bytes(self) -> tuple[float, ...]:
        return tuple(float(peak) for peak in self.timeline.peak_memory)

    @property
    def total_bytes(self) -> tuple[float, ...]:
        reserved = self.job.cluster.reserved
        return tuple(
            state + activations + reserved
            for state, activations in zip(self.state_bytes, self.activation_bytes, strict=True)
        )

    @property
    def fits(self) -> bool:
        return max(self.total_bytes) <= self.job.cluster.memory and not self.is_over_limit

    @property
    def is_over_limit(self) -> bool:
        """Whether no plan is possible under the limit, so that this is the one that needs the least memory."""
        return self.limit is not None and max(self.activation_bytes) > self.limit * (1 + 1e-9)

    @property
    def memory_text(self) -> str:
        """What the fullest rank needs and what there is, such as `355.27 of 80.00 GiB`."""
        needed, available = max(self.total_bytes), self.job.cluster.memory
        if needed > available or self.limit is None or not self.is_over_limit:
            return f"{gib(needed)} of {gib(available)} GiB"
        return f"{gib(max(self.activation_bytes))} of {gib(self.limit)} GiB of activations"

    @property
    def reduction_ms(self) -> float:
        """The exposed time of what the fullest rank and its replicas exchange: gradients, and sharded parameters.

        With --overlap-grad-reduce, and with --use-torch-fsdp2, which overlaps by itself, nothing is exposed.
        """
        args = self.job.args
        if self.job.replicas == 1 or args.overlap_grad_reduce or args.use_torch_fsdp2:
            return 0.0
        return self.job.cluster.message_ms(max(self.job.exchanged_bytes(self.timeline.schedule.placement)))

    @cached_property
    def iteration_ms(self) -> float:
        """Time from one iteration to the next: forward, backward and the reduction, without the optimizer's step."""
        schedule, costs = self.timeline.schedule, self.timeline.costs
        time = self.timeline.makespan
        if self.job.args.zero_bubble_post_validation and self.job.awaited(schedule.placement) is None:
            time = iteration_time(with_post_validation(schedule, costs), costs)
        return float(time) + self.reduction_ms

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second for each device."""
        args = self.job.args
        assert args.global_batch_size is not None
        return args.global_batch_size * args.seq_length / (self.iteration_ms / 1e3) / args.world_size

    @property
    def tflops(self) -> float:
        """TFLOP/s of one device, counted as --log-throughput does."""
        args = self.job.args
        assert args.global_batch_size is not None
        total = flops_per_iteration(args, args.global_batch_size)
        return total / (self.iteration_ms / 1e3) / args.world_size / 1e12

    def as_json(self, baseline: Estimate | None) -> dict[str, Any]:
        schedule = self.timeline.schedule
        return {
            "schedule": schedule.name,
            "num_chunks": schedule.num_chunks,
            "fits": self.fits,
            "state_bytes": list(self.state_bytes),
            "activation_bytes": list(self.activation_bytes),
            "total_bytes": list(self.total_bytes),
            "activation_limit_bytes": self.limit,
            **self.timeline.idle.as_json(),
            "makespan_ms": float(self.timeline.makespan),
            "span_ms": float(self.timeline.cost),
            "reduction_ms": self.reduction_ms,
            "iteration_ms": self.iteration_ms,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "tflops_per_gpu": self.tflops,
            "ratio_to_1f1b": None if baseline is None else baseline.iteration_ms / self.iteration_ms,
        }


def estimate(job: EstimatedJob, name: str) -> Estimate:
    """Estimate the schedule `name` for `job`.

    Raises:
        ValueError: the layers cannot be cut for it, or (as `ScheduleError`) it is not possible at these sizes.
    """
    args = job.args
    placement = _placement_of(job, name)
    costs = stage_costs(job, placement)
    held = rank_parameters(args, placement)
    states = tuple(job.states.of_rank(one, job.replicas, args.expert_model_parallel_size) for one in held)
    limit = _activation_limit(job, costs, placement, max(states)) if not entry_of(name).has_own_limit else None
    limits = None if limit is None else limits_of_ranks((limit,) * placement.num_ranks, _inside(job))
    request = PlanRequest(
        name,
        job.num_microbatches,
        (placement,),
        costs,
        memory_limit=limits,
        group_size=None if placement.kind != "interleaved" else args.microbatch_group_size_per_virtual_pipeline_stage,
        recomputes=(job.flags.recompute,),
        vocabulary_parallel=job.flags.vocabulary_parallel,
        post_validation=job.flags.interlocks_iterations,
        takes_makespan=name == "auto",
        effort=QUICK_EFFORT if job.is_quick else EFFORT,
    )
    try:
        schedule = schedule_of(request)
    except Infeasible as error:
        if job.flags.memory_limit is None or not job.flags.memory_limit.is_auto:
            raise
        # The device is too small for any plan: the one that needs the least says how much too small.
        schedule = schedule_of(replace(request, memory_limit=error.smallest_limit))
    return Estimate(job, simulate(schedule, costs), states, limit)


def _placement_of(job: EstimatedJob, name: str) -> Placement:
    """Return the placement of the schedule `name`; one for any placement takes that of the job's flags."""
    entry, flags, num_ranks = entry_of(name), job.flags, job.args.pipeline_model_parallel_size
    if entry.takes_placement and flags.zero_bubble_placement is not None:
        return placement_for(name, num_ranks, flags.model_chunks, cast("PlacementKind", flags.zero_bubble_placement))
    return placement_for(name, num_ranks, (job.num_chunks or flags.model_chunks) if entry.takes_num_chunks else None)


def gib(num_bytes: float) -> str:
    """Return a number of bytes in GiB with two decimals."""
    return f"{num_bytes / 2**30:.2f}"


def as_megatron_runs(ours: Estimate) -> Estimate:
    """Return the estimate of the same schedule as megatron-core runs it: B recomputes, and the vocabulary is whole."""
    if ours.job.flags.vocabulary_parallel:
        ours = estimate(ours.job.with_flags({"zero_bubble_vocabulary_parallel": "off"}), ours.timeline.schedule.name)
    return replace(ours, timeline=as_megatron_recomputes(ours.timeline))


def _activation_limit(job: EstimatedJob, costs: StageCosts, placement: Placement, states: float) -> float:
    """Return the bytes that a rank's activations may take, by the job's memory limit, or the default one.

    They are negative where the states alone do not fit.

    As in training, all ranks have the limit of the fullest, which holds `states` bytes of states.
    """
    limit = job.flags.memory_limit or MemoryLimit(multiple=1.0, is_interleaved=placement.kind == "interleaved")
    free = MARGIN * (job.cluster.memory - job.cluster.reserved - states)
    return limit.in_bytes(placement, costs, job.num_microbatches, int(free), _inside(job), job.flags.recompute)


def _inside(job: EstimatedJob) -> tuple[float, ...]:
    """Return for every rank the bytes that an operation needs while it runs; zeros unless a profile says it."""
    if job.profile is None:
        return (0.0,) * job.args.pipeline_model_parallel_size
    return job.profile.inside_ranks


def stage_costs(job: EstimatedJob, placement: Placement) -> StageCosts:
    """Return the costs of every stage in milliseconds and bytes, from the profile if there is one.

    Raises:
        ValueError: the layers cannot be cut into these stages.
    """
    if job.profile is not None:
        measured = _from_profile(job.profile, placement)
        return measured if job.flags.vocabulary_parallel else measured.with_whole_vocabulary()
    stages = [unit_costs(job, stage) for stage in stages_of(job.args, placement)]
    turns = [placement.rank_of(s) == placement.rank_of(s + 1) for s in range(len(stages) - 1)]
    costs = StageCosts(
        # A stage with the embedding alone computes next to nothing, but a cost must be above zero.
        time_f=tuple(max(_SHORTEST, stage.time_f) for stage in stages),
        time_b=tuple(max(_SHORTEST, stage.time_b) for stage in stages),
        time_w=tuple(max(_SHORTEST, stage.time_w) for stage in stages),
        time_comm=tuple(0.0 if turn else message_ms(job) for turn in turns),
        memory_f=tuple(stage.memory_f for stage in stages),
        memory_b=tuple(stage.memory_b for stage in stages),
        memory_w=tuple(stage.memory_w for stage in stages),
        time_r=tuple(stage.time_r for stage in stages),
        memory_r=tuple(stage.memory_r for stage in stages),
    )
    costs = costs if job.flags.recompute is not Recompute.NONE else costs.recomputing_in_backward()
    return costs.with_shards(placement, _shard_costs(job, placement)) if job.args.vocabulary_parallel else costs


def _shard_costs(job: EstimatedJob, placement: Placement) -> Mapping[str, float]:
    """Return the costs of the vocabulary shard of a rank."""
    embedding = unit_costs(job, StageLayers(0, is_first=True, is_last=False))
    output = unit_costs(job, StageLayers(0, is_first=False, is_last=True))
    return ModelCosts(embedding, (), output).vocabulary_parallel(placement.num_ranks).shard or {}


def unit_costs(job: EstimatedJob, stage: StageLayers) -> UnitCosts:
    """Return the costs of a part of the model in milliseconds and bytes, from its operations and tensors."""
    args, operations_a_ms = job.args, job.cluster.flops / 1e3
    flops, activations = stage_flops(args, stage), stage_activations(args, stage)
    return UnitCosts(
        time_f=flops.f / operations_a_ms,
        time_b=flops.b / operations_a_ms,
        time_w=flops.w / operations_a_ms,
        memory_f=activations.after_f,
        memory_b=activations.after_b - activations.after_f,
        memory_w=-activations.after_b,
        time_r=flops.r / operations_a_ms,
        memory_r=activations.restored,
        state=job.states.of_rank(stage_parameters(args, stage), job.replicas, args.expert_model_parallel_size),
    )


def message_ms(job: EstimatedJob) -> float:
    """Return the time of the message of one microbatch between two pipeline ranks."""
    args = job.args
    message = element_bytes(args) * args.micro_batch_size * args.seq_length * args.hidden_size
    share = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return job.cluster.message_ms(message / share)


def _from_profile(profile: Profile, placement: Placement) -> StageCosts:
    if profile.placement == placement:
        return profile.costs
    if profile.placement == Placement("linear", placement.num_ranks):
        return profile.costs.split_ranks(placement)
    raise ScheduleError(
        f"the profile is of the {profile.placement.kind} placement of {profile.placement.num_ranks} ranks"
    )


def model_flops(job: EstimatedJob, placement: Placement) -> Flops:
    """Return the operations of F, B, W and R of one microbatch, all ranks together, on one tensor-parallel rank."""
    stages = [replace(stage, has_vocabulary=True) for stage in stages_of(job.args, placement)]
    each = [stage_flops(job.args, stage) for stage in stages]
    return Flops(*(sum(values) for values in zip(*each, strict=True)))
