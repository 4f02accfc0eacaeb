"""Estimates the memory and the throughput of one schedule, or of the layout that a training run would choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from megatron.zero_bubble.cli.estimate.estimated_job import EstimatedJob
from megatron.zero_bubble.planner import PlanRequest, placement_for, schedule_of
from megatron.zero_bubble.planner.prediction import as_megatron_recomputes
from megatron.zero_bubble.planner.registry import entry_of
from megatron.zero_bubble.planner.request import EFFORT, QUICK_EFFORT
from megatron.zero_bubble.runtime.device import MARGIN, limits_of_ranks
from megatron.zero_bubble.schedule import Infeasible, Schedule, Timeline, iteration_time, simulate, with_post_validation
from megatron.zero_bubble.schedule.host_link import host_memory, offloaded_share
from megatron.zero_bubble.schedule.ir import PlacementKind
from megatron.zero_bubble.session.features import awaited_by_the_first_stage, plans_offload, takes_makespan
from megatron.zero_bubble.session.flags import flags_text, limit_flag
from megatron.zero_bubble.session.layers import WITHOUT_PARTITION
from megatron.zero_bubble.session.layout_choice import LayoutChoice, choose_layout
from megatron.zero_bubble.session.layout_words import flags_of_layout
from megatron.zero_bubble.session.plans import group_size


@dataclass(frozen=True)
class Estimate:
    """The estimate of one schedule; times are in milliseconds, memory is in bytes for each pipeline rank."""

    job: EstimatedJob
    timeline: Timeline
    state_bytes: tuple[float, ...]
    limit: float | None = None
    """Bytes of activations that the schedule may hold on a rank; None if the schedule was planned without a limit."""
    without_pairs: Timeline | None = None
    """Timeline of a plan without pairs, for comparison; a pair is an F and a B that run as one operation."""

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @property
    def activation_bytes(self) -> tuple[float, ...]:
        return tuple(float(peak) for peak in self.timeline.peak_memory)

    @property
    def total_bytes(self) -> tuple[float, ...]:
        reserved = self.job.cluster.reserved_memory
        parts = zip(self.state_bytes, self.activation_bytes, strict=True)
        return tuple(state + activations + reserved for state, activations in parts)

    @property
    def fullest(self) -> int:
        """The rank that needs the most memory."""
        return self.total_bytes.index(max(self.total_bytes))

    @property
    def fits(self) -> bool:
        return max(self.total_bytes) <= self.job.cluster.device_memory and not self.is_over_limit

    @property
    def is_over_limit(self) -> bool:
        """Whether no plan fits the memory limit; the estimate then describes the plan with the least memory."""
        return self.limit is not None and max(self.activation_bytes) > self.limit * (1 + 1e-9)

    @property
    def memory_text(self) -> str:
        """Needed and available memory of the fullest rank, such as `355.27 of 80.00 GiB`."""
        needed, available = max(self.total_bytes), self.job.cluster.device_memory
        if needed <= available and self.limit is not None and self.is_over_limit:
            return f"{gib(max(self.activation_bytes))} of {gib(self.limit)} GiB of activations"
        return f"{gib(needed)} of {gib(available)} GiB"

    @property
    def host_bytes(self) -> tuple[float, ...]:
        """Peak host memory of every rank, in bytes."""
        return tuple(map(float, host_memory(self.schedule, self.timeline.costs)))

    @property
    def reduction_ms(self) -> float:
        """Time that the exchange of gradients and sharded parameters between replicas adds to an iteration."""
        args = self.job.args
        if max(self.job.replicas) == 1 or args.overlap_grad_reduce or args.use_torch_fsdp2:
            return 0.0
        return self.job.cluster.message_ms(max(self.job.exchanged_bytes(self.schedule.placement)))

    @cached_property
    def iteration_ms(self) -> float:
        """Time from one iteration to the next, including gradient reduction but not the optimizer step."""
        return self._time_of(self.timeline)

    @property
    def gain_of_pairs(self) -> float | None:
        """Speedup from pairs, which run an F and a B as one operation; None if no plan without pairs was made."""
        return None if self.without_pairs is None else self._time_of(self.without_pairs) / self.iteration_ms

    def _time_of(self, timeline: Timeline) -> float:
        schedule, costs, flags = timeline.schedule, timeline.costs, self.job.flags
        time = timeline.makespan
        if flags.zero_bubble_post_validation and awaited_by_the_first_stage(flags, schedule.placement) is None:
            time = iteration_time(with_post_validation(schedule, costs), costs)
        return float(time) + self.reduction_ms

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second for each device."""
        args = self.job.args
        return self.job.flags.global_batch_size * args.seq_length / (self.iteration_ms / 1e3) / args.world_size

    @property
    def tflops(self) -> float:
        """TFLOP/s of one device, counted as --log-throughput does."""
        return self.job.flops_per_iteration / (self.iteration_ms / 1e3) / self.job.args.world_size / 1e12

    def as_json(self, baseline: Estimate | None = None) -> dict[str, Any]:
        """Return the estimate's values as JSON, including the speed relative to the estimate `baseline`."""
        return {
            "schedule": self.schedule.name,
            "num_chunks": self.schedule.num_chunks,
            "fits": self.fits,
            "state_bytes": list(self.state_bytes),
            "activation_bytes": list(self.activation_bytes),
            "total_bytes": list(self.total_bytes),
            "activation_limit_bytes": self.limit,
            "offloaded": offloaded_share(self.schedule),
            "host_bytes": list(self.host_bytes),
            **self.timeline.idle.as_json(),
            "makespan_ms": float(self.timeline.makespan),
            "span_ms": float(self.timeline.cost),
            "reduction_ms": self.reduction_ms,
            "iteration_ms": self.iteration_ms,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "tflops_per_gpu": self.tflops,
            "gain_of_overlapped_experts": self.gain_of_pairs,
            "ratio_to_1f1b": None if baseline is None else baseline.iteration_ms / self.iteration_ms,
        }


@dataclass(frozen=True)
class LayoutEstimate(Estimate):
    """The estimate of the layout that a training run would choose."""

    choice: LayoutChoice = field(kw_only=True)
    layout_flags: Mapping[str, Any] = field(kw_only=True)
    """Names and values of the flags that fix the layout; the value None means that the flag is not given."""

    def as_json(self, baseline: Estimate | None = None) -> dict[str, Any]:
        layout = self.choice.plan.layout
        return {
            "placement": layout.placement.kind,
            "num_chunks": layout.placement.num_chunks,
            "partition": list(layout.partition),
            "recompute": layout.recompute.value,
            "flags": flags_text(self.layout_flags),
            **super().as_json(baseline),
        }


def gib(num_bytes: float) -> str:
    """Return a number of bytes in GiB with two decimals."""
    return f"{num_bytes / 2**30:.2f}"


def estimate(job: EstimatedJob, name: str) -> Estimate:
    """Estimate the schedule `name` for `job`.

    Raises:
        ValueError: the layers cannot be divided among stages, or (as `ScheduleError`) the schedule is not possible.
    """
    flags, entry = job.flags, entry_of(name)
    num_ranks, kind = flags.pipeline_model_parallel_size, cast("PlacementKind | None", flags.zero_bubble_placement)
    chunks = flags.model_chunks if entry.takes_num_chunks else None
    placement = placement_for(name, num_ranks, chunks, kind if entry.takes_placement else None)
    costs = job.stage_costs(placement)
    states = tuple(map(job.bytes_of, job.parameters(placement)))
    limit = limits = None
    is_named = flags.schedule == name and flags.zero_bubble_memory_limit is not None
    if not entry.has_own_limit or (entry.takes_limit and is_named):
        # As in training, the fullest rank determines all ranks' limit, which is negative if its states do not fit.
        free = MARGIN * (job.cluster.device_memory - job.cluster.reserved_memory - max(states))
        inside = (0.0,) * num_ranks if job.profile is None else job.profile.inside_ranks
        allowed = flags.memory_limit or flags.peak_of_megatron(is_interleaved=placement.kind == "interleaved")
        limit = max(allowed.of_ranks(placement, costs, flags.most_microbatches, int(free), inside, flags.recompute))
        limits = limits_of_ranks((limit,) * num_ranks, inside)
    request = PlanRequest(
        name,
        job.flags.most_microbatches,
        (placement,),
        costs,
        memory_limit=limits,
        group_size=group_size(flags, placement) if placement.kind == "interleaved" else None,
        recomputes=(flags.recompute,),
        vocabulary_parallel=flags.vocabulary_parallel,
        post_validation=flags.interlocks_iterations,
        takes_makespan=takes_makespan(flags, name),
        pairs=flags.overlap_moe_expert_parallel_comm,
        offloads=plans_offload(flags) and limits is not None and entry.uses_costs,
        effort=QUICK_EFFORT if job.is_quick else EFFORT,
    )
    try:
        schedule = schedule_of(request)
    except Infeasible as error:
        if flags.memory_limit is None or not flags.memory_limit.is_auto:
            raise Infeasible(f"{limit_flag(job.args)}: {error}", error.smallest_limit) from None
        # No plan fits on the device: the plan with the least memory shows how much memory is missing.
        request = request.within((error.smallest_limit,) * num_ranks)
        schedule = schedule_of(request)
    without = None
    if request.pairs and entry.plans_all_kinds:
        without = simulate(schedule_of(replace(request, pairs=False)), costs)
    return Estimate(job, simulate(schedule, costs), states, limit, without)


def estimate_layout(job: EstimatedJob, *, frees_layout: bool = False) -> LayoutEstimate:
    """Search the layouts that the job's flags allow, in the same way as the training but with estimated costs.

    Args:
        frees_layout: whether to search all layouts even if Megatron's flags fix a layout. The search keeps the layout
            of Megatron's flags unless another layout is at least 2% faster.

    Raises:
        ValueError: no layout fits, or (as `ScheduleError`) there are fewer layers than ranks.
    """
    choice = choose_layout(
        job.flags,
        job.costs,
        job.cluster.device_memory - job.cluster.reserved_memory,
        job.args.padded_vocab_size,
        is_quick=job.is_quick,
        frees_layout=frees_layout,
        host_rate=job.host_rate,
    )
    plan, pattern = choice.plan, job.flags.pattern
    flags = flags_of_layout(plan.layout, job.flags.mtp_num_layers, None if pattern is None else pattern.whole())
    fixed = job.with_flags({**WITHOUT_PARTITION, **flags})
    if job.flags.zero_bubble_memory_limit is None:
        # By default, the layout in another run is limited by the peak of 1F1B in this layout, which may not fit.
        flags = {**flags, "zero_bubble_memory_limit": "auto"}
    return LayoutEstimate(fixed, plan.timeline, plan.states, choice=choice, layout_flags=flags)


def as_megatron_runs(ours: Estimate) -> Estimate:
    """Return the estimate `ours` with any recomputation inside B and without vocabulary shards, as in megatron-core."""
    if ours.job.flags.vocabulary_parallel:
        ours = estimate(ours.job.with_flags({"zero_bubble_vocabulary_parallel": "off"}), ours.schedule.name)
    return replace(ours, timeline=as_megatron_recomputes(ours.timeline))
