"""Chooses the layout that a job's flags leave open, from the costs of the model's embedding, layers and output."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron.zero_bubble.mcore.refusals import works_with
from megatron.zero_bubble.mcore.refused_settings import Feature
from megatron.zero_bubble.planner import Plan, all_placements, placement_for, search_layouts
from megatron.zero_bubble.planner.megatrons_split import capacity_of_multiple, megatrons_layout, on_megatrons_split
from megatron.zero_bubble.planner.memory_limit import bytes_with_unit
from megatron.zero_bubble.planner.prediction import MegatronsTime, work_of_stages
from megatron.zero_bubble.planner.request import EFFORT, QUICK_EFFORT, Layout, PlanRequest
from megatron.zero_bubble.runtime.device import MARGIN
from megatron.zero_bubble.schedule import Infeasible, Placement, ScheduleError
from megatron.zero_bubble.schedule.ir import PlacementKind
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.features import may_spread
from megatron.zero_bubble.session.flags import CHUNK_FLAGS, flag_name, limit_flag
from megatron.zero_bubble.session.hybrid_pattern import undivided
from megatron.zero_bubble.session.job_flags import LAYOUT_SETTINGS, RECOMPUTATION, JobFlags
from megatron.zero_bubble.session.layers import (
    WITHOUT_PARTITION,
    chunks_of_flags,
    partition_of_flags,
    partition_sources,
    too_few_layers,
)

_PATTERN = "hybrid_layer_pattern"
LIMITS = "zero_bubble_layout_limits"
"""Name of the argument that records the memory limits of the chosen layout."""
SAVED_NAMES = (
    *("pipeline_model_parallel_layout", "zero_bubble_placement", "zero_bubble_recompute", "zero_bubble_seed_by_layer"),
    *("zero_bubble_vocabulary_parallel", _PATTERN, LIMITS),
)
"""Names of arguments in a checkpoint that record the chosen layout."""
_KEPT_WITH = ("pipeline_model_parallel_size", "num_layers", *RECOMPUTATION)
"""Names of the flags that must have the checkpoint's values if a job is to keep the checkpoint's layout."""
_LIMITED_BY = (
    *("zero_bubble_memory_limit", "world_size", "global_batch_size", "step_batch_sizes", "use_distributed_optimizer"),
)
"""Names of the flags that must have the checkpoint's values if the checkpoint's memory limits are to hold."""


@dataclass(frozen=True)
class ChosenLayout:
    """A layout that a job adopts.

    Attributes:
        flags: names and values of the flags that fix the layout and the memory limits of the layout.
        request: the `PlanRequest` from which the layout was planned; None if the layout was not planned from costs.
        megatrons: the predicted time of megatron-core's own schedule on Megatron's split of the layers; None if the
            layout is Megatron's split, or if the time is unknown.
        is_megatrons_split: whether the layout equals the layout of Megatron's flags, apart from recomputation. By
            default, the memory limit of Megatron's layout is the measured peak memory of megatron-core's own schedule,
            so that megatron-core's order of operations always fits.
    """

    flags: Mapping[str, Any]
    request: PlanRequest | None = None
    megatrons: MegatronsTime | None = None
    is_megatrons_split: bool = False


@dataclass(frozen=True)
class LayoutChoice:
    """The plan of the chosen layout, with the plans of other layouts and of Megatron's layout for comparison."""

    plan: Plan
    megatrons: tuple[Plan, ...]
    """Plans of Megatron's layout that fit in memory: with the job's schedule, and with megatron-core's own schedule."""
    request: PlanRequest
    """The `PlanRequest` that covers all layouts that the flags allow."""
    rehearsed: tuple[tuple[Plan, float], ...] = ()
    """Pairs of a rehearsed plan and its measured and scaled step time in ms. A rehearsal runs some steps of a plan."""

    @property
    def is_megatrons_split(self) -> bool:
        """Whether the chosen layout is the layout of Megatron's flags, apart from recomputation."""
        usual = self.plan.request.usual
        return usual is not None and replace(self.plan.layout, recompute=usual.recompute) == usual

    @property
    def megatrons_time(self) -> MegatronsTime | None:
        """Predicted step time of Megatron's layout and schedule; None if this layout is chosen or does not fit.

        The time of a `Plan` includes the slowdown by varying durations. A job compares `MegatronsTime` with simulated
        times of the chosen layout, so that the slowdown of the chosen plan is taken out of both.
        """
        own = [plan for plan in self.megatrons if plan.request.schedule != self.plan.request.schedule]
        if not own or self.is_megatrons_split:
            return None
        return MegatronsTime(own[0].time / self.plan.slowdown, work_of_stages(self.plan.timeline.costs))


def is_layout_open(flags: JobFlags) -> bool:
    """Whether a search chooses partition, placement and chunks; False if flags set the schedule or the layout."""
    return _searches_layouts(flags) and not partition_sources(flags)


def _searches_layouts(flags: JobFlags) -> bool:
    return flags.zero_bubble and flags.zero_bubble_schedule is None and not flags.zero_bubble_keep_layout


def megatrons_layout_flags(flags: JobFlags) -> list[str]:
    """The Megatron flags that fix the partition or the number of chunks, which `--zero-bubble` would otherwise choose.

    The returned list of flags is empty if a flag of zero bubble fixes the layout.
    """
    if not _searches_layouts(flags) or flags.zero_bubble_placement is not None:
        return []
    chunks = {name: getattr(flags, name) for name in CHUNK_FLAGS}
    sources = partition_sources(flags)
    if len(sources) > 1:  # `pipeline_model_parallel_layout` was made from the other flags
        sources = partition_sources(replace(flags, pipeline_model_parallel_layout=None))
    return [*sources, *(f"{flag_name(name)} {value}" for name, value in chunks.items() if value)]


def check_unit_costs_output(flags: JobFlags) -> None:
    """Raise `ValueError` if the flags ask for a file of layer costs although other flags fix the layout."""
    if flags.zero_bubble_unit_costs_output is not None and not is_layout_open(flags):
        given = f"--zero-bubble-unit-costs-output {flags.zero_bubble_unit_costs_output}"
        raise ValueError(
            f"{given}: layers are measured only if --zero-bubble chooses the layout: leave out flags that fix it, such "
            "as --zero-bubble-schedule, --zero-bubble-keep-layout or --pipeline-model-parallel-layout"
        )


def choose_layout(
    flags: JobFlags,
    model: ModelCosts,
    free_bytes: float | None,
    padded_vocab_size: int,
    *,
    is_quick: bool = False,
    frees_layout: bool = False,
    host_rate: float | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> LayoutChoice:
    """Choose a layout among the layouts that the flags allow, for the job's largest number of microbatches.

    Args:
        free_bytes: free memory of a device before the model is built; None for no limit.
        is_quick: whether to plan with little search effort.
        frees_layout: whether to search all layouts, even if Megatron's flags fix a layout.
        host_rate: bytes copied per millisecond between device and host; None without offload.
        report: function that the search calls repeatedly with text about its progress.

    Raises:
        ValueError: no layout fits in the memory, or there are fewer layers than ranks.
    """
    layers = tuple(replace(layer, num_blocks=layer.num_blocks / flags.layers_of_block) for layer in model.layers)
    model = replace(model, layers=layers, ties_output=not flags.untie_embeddings_and_output_weights)
    request = replace(
        _request(flags, model, _megatrons_layout(flags), free_bytes, frees_layout=frees_layout),
        vocabulary_parallel=may_spread(flags, padded_vocab_size),
        effort=QUICK_EFFORT if is_quick else EFFORT,
        offloads=host_rate is not None,
        host_rate=host_rate,
    )
    try:
        plan = search_layouts(request, report)
    except Infeasible as error:
        memory = "activations" if request.memory_limit is not None else "states and activations"
        raise ValueError(
            f"{limit_flag(flags)}: no layout of the layers fits: {bytes_with_unit(error.smallest_limit)} for each "
            f"rank are enough for {memory}"
        ) from error
    return LayoutChoice(plan, on_megatrons_split(request, plan), request)


def saved_choice(saved: Namespace, flags: JobFlags) -> ChosenLayout | None:
    """The layout that a saved job chose; `saved` contains the arguments in the job's checkpoint.

    `saved_choice` returns None if the saved job chose no layout. `saved_choice` also returns None if the saved job
    differs from `flags` in the number of pipeline ranks, in the layers or in Megatron's recomputation flags, or if
    `flags` ask for another layout. With FSDP2, `saved_choice` returns None for a layout with recomputation or
    vocabulary shards.
    """
    chosen = {name: getattr(saved, name, None) for name in SAVED_NAMES}
    same = all(getattr(saved, name, None) == getattr(flags, name) for name in _KEPT_WITH)
    same = same and undivided(chosen[_PATTERN]) == undivided(flags.hybrid_layer_pattern)
    others = {name: value for name, value in chosen.items() if name != _PATTERN}
    allowed = all(getattr(flags, name) in (None, False, "auto", value) for name, value in others.items())
    beyond_fsdp = chosen["zero_bubble_recompute"] is not None or chosen["zero_bubble_vocabulary_parallel"] == "on"
    if not same or not allowed or (flags.use_torch_fsdp2 and beyond_fsdp):
        return None
    if _limited_by(JobFlags.of(saved)) != _limited_by(flags):
        chosen[LIMITS] = None
    if (kind := chosen["zero_bubble_placement"]) is None:
        return None
    layout: dict[str, Any] = {**chosen, **dict.fromkeys(CHUNK_FLAGS)}
    resumed = replace(flags, **layout)
    placement = Placement(kind, flags.pipeline_model_parallel_size, chunks_of_flags(resumed) or 1)
    if flags.model_chunks is not None and placement not in _placements(flags, str(flags.schedule)):
        return None
    usual = _megatrons_layout(flags)
    spreads = chosen["zero_bubble_vocabulary_parallel"] == "on"
    again = Layout(placement, partition_of_flags(resumed, placement), usual.recompute, spreads)
    return ChosenLayout(layout, is_megatrons_split=again == usual)


def _limited_by(flags: JobFlags) -> list[Any]:
    model = {name: value for name, value in flags.given_model.items() if name not in LAYOUT_SETTINGS}
    return [model, *(getattr(flags, name) for name in _LIMITED_BY)]


def _request(
    flags: JobFlags, model: ModelCosts, usual: Layout, free_bytes: float | None, *, frees_layout: bool
) -> PlanRequest:
    """Build the `PlanRequest` for all layouts that the flags allow, under the memory limit that the flags set."""
    name = flags.schedule
    assert name is not None
    capacity, activations = None if free_bytes is None else MARGIN * free_bytes, None
    request = PlanRequest(
        name,
        flags.most_microbatches,
        _placements(flags, name, frees_layout=frees_layout),
        model,
        usual=usual,
        recomputes=_recomputes(flags),
        group_size=flags.microbatch_group_size_per_virtual_pipeline_stage,
        post_validation=flags.interlocks_iterations,
        takes_makespan=True,
        pairs=flags.overlap_moe_expert_parallel_comm,
    )
    limit, of_usual = flags.memory_limit, None
    if limit is not None and limit.num_bytes is not None:
        activations = float(limit.num_bytes)
    elif limit is not None and limit.multiple is not None:
        peak = capacity_of_multiple(request, usual, limit.multiple, is_interleaved=limit.is_interleaved)
        # Megatron's layout may take all free memory, because it would also do so without --zero-bubble.
        of_usual = None if free_bytes is None else min(free_bytes, peak)
        capacity = peak if capacity is None else min(capacity, peak)
    return replace(request, capacity=capacity, usual_capacity=of_usual, memory_limit=activations)


def _megatrons_layout(flags: JobFlags) -> Layout:
    """The layout that Megatron's flags describe."""
    num_ranks, chunks = flags.pipeline_model_parallel_size, flags.model_chunks or 1
    if partition_sources(flags):
        placement = Placement("linear" if chunks == 1 else "interleaved", num_ranks, chunks)
        if flags.pipeline_model_parallel_layout is not None:  # the job may have made this flag from the other flags
            flags = replace(flags, **WITHOUT_PARTITION)
        return Layout(placement, partition_of_flags(flags, placement), flags.recompute)
    try:
        return megatrons_layout(flags.num_layers, num_ranks, chunks, flags.recompute)
    except ScheduleError as error:
        raise too_few_layers(flags.num_layers, flags.hybrid_layer_pattern, error) from error


def _placements(flags: JobFlags, name: str, *, frees_layout: bool = False) -> tuple[Placement, ...]:
    """The candidate placements; only one if the flags set the number of chunks and `frees_layout` is False."""
    num_ranks, kind = flags.pipeline_model_parallel_size, cast("PlacementKind | None", flags.zero_bubble_placement)
    own = () if flags.model_chunks is None else (placement_for(name, num_ranks, flags.model_chunks, kind),)
    if own and not frees_layout:
        return own
    every = all_placements(num_ranks, flags.num_layers)
    return tuple(dict.fromkeys((*(placement for placement in every if kind in (None, placement.kind)), *own)))


def _recomputes(flags: JobFlags) -> tuple[Recompute, ...]:
    """The candidate kinds of recomputation; only one if flags set the kind or exclude planned recomputation."""
    is_given = any(getattr(flags, name) is not None for name in (*RECOMPUTATION, "zero_bubble_recompute"))
    # R would use parameters that FSDP2 has not gathered, and forwards in pairs cannot be recomputed.
    is_impossible = flags.use_torch_fsdp2 or flags.overlap_moe_expert_parallel_comm
    if is_given or is_impossible or not works_with(flags, Feature.PLANNED_RECOMPUTATION):
        return (flags.recompute,)
    if flags.pattern is not None:
        from megatron.zero_bubble.mcore.decoder_models import HYBRID_RECOMPUTES

        if not HYBRID_RECOMPUTES:
            return (flags.recompute,)
    return (Recompute.NONE, Recompute.PLANNED)
