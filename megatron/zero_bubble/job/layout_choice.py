"""Chooses the layout that a job's flags leave open, from the costs of the model's units."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, cast

from megatron.zero_bubble.job.flags import limit_flag
from megatron.zero_bubble.job.job_flags import RECOMPUTATION, JobFlags
from megatron.zero_bubble.job.layers import partition_sources, spread_layers, to_layout
from megatron.zero_bubble.job.sharding import may_spread
from megatron.zero_bubble.runtime.replanner import MARGIN
from megatron.zero_bubble.schedule import Infeasible, Placement, ScheduleError, StageCosts
from megatron.zero_bubble.schedule.generators import placement_for
from megatron.zero_bubble.schedule.ir import PlacementKind
from megatron.zero_bubble.schedule.layouts import (
    Layout,
    LayoutPlan,
    LayoutProblem,
    all_placements,
    search_layouts,
)
from megatron.zero_bubble.schedule.memory_limit import MemoryLimit
from megatron.zero_bubble.schedule.model_costs import ModelCosts
from megatron.zero_bubble.schedule.prediction import as_megatron_recomputes
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.search.problem import QUICK_BUDGET

SAVED_NAMES = (
    *("pipeline_model_parallel_layout", "zero_bubble_placement", "zero_bubble_recompute", "zero_bubble_seed_by_layer"),
    "zero_bubble_vocabulary_parallel",
)
"""Arguments in a checkpoint that say which layout was chosen."""
_KEPT_WITH = ("pipeline_model_parallel_size", "num_layers")
"""Flags that must be the same for a saved layout to be kept."""


@dataclass(frozen=True)
class ChosenLayout:
    """A layout as a job takes it over.

    Attributes:
        flags: the flags, by name, that fix it.
        costs, limits: of its stages, and the bytes that activations may take on every rank, as planned with; None for
            a layout that was not planned with costs.
        speed_up: how many times as fast as 1F1B on Megatron's split it was predicted to be; None if that is not known.
    """

    flags: Mapping[str, Any]
    costs: StageCosts | None = None
    limits: tuple[float, ...] | None = None
    speed_up: float | None = None


@dataclass(frozen=True)
class LayoutChoice:
    """The layouts that a search found, and Megatron's split for comparison."""

    plans: tuple[LayoutPlan, ...]
    """The chosen layout first, then the others from the shortest predicted time to the longest."""
    megatrons: tuple[LayoutPlan, ...]
    """Megatron's split, with the job's schedule and with megatron-core's own; without what does not fit."""
    model: ModelCosts

    @property
    def chosen(self) -> LayoutPlan:
        return self.plans[0]

    @property
    def speed_ups(self) -> dict[str, float]:
        """Schedule on Megatron's split -> how many times as fast the chosen layout is predicted to be."""
        return {plan.timeline.schedule.name: plan.time / self.chosen.time for plan in self.megatrons}


def is_layout_open(flags: JobFlags) -> bool:
    """Whether the flags leave partition, placement or chunks to the search; who names a schedule chooses these, too."""
    if not flags.zero_bubble or flags.zero_bubble_schedule is not None or flags.zero_bubble_keep_layout:
        return False
    return not partition_sources(flags)


def choose_layout(
    flags: JobFlags, model: ModelCosts, free_bytes: float | None, padded_vocab_size: int, *, is_quick: bool = False
) -> LayoutChoice:
    """Search the layouts that the flags leave open, for the job's largest number of microbatches.

    Args:
        free_bytes: what a device has free before the model is built; None if nothing limits it.
        is_quick: plan with little effort.

    Raises:
        ValueError: no layout fits, or (as `ScheduleError`) there are fewer layers than ranks.
    """
    baseline = _megatrons_layout(flags)
    model = replace(model, ties_output=not flags.untie_embeddings_and_output_weights)
    problem = _problem(flags, model, baseline, free_bytes)
    problem = replace(problem, vocabulary_parallel=may_spread(flags, padded_vocab_size))
    if is_quick:
        problem = replace(problem, budget=QUICK_BUDGET)
    try:
        plans = search_layouts(problem)
    except Infeasible as error:
        raise ValueError(
            f"{limit_flag(flags)}: no layout of the layers fits: the fullest rank needs at least "
            f"{ceil(error.smallest_limit)} bytes for activations"
        ) from error
    return LayoutChoice(tuple(plans), tuple(_on_megatrons_split(flags, problem, baseline)), model)


def _on_megatrons_split(flags: JobFlags, problem: LayoutProblem, baseline: Layout) -> Iterator[LayoutPlan]:
    """The plans, where they fit, of the job's schedule and of megatron-core's own, whose backwards recompute."""
    with suppress(ScheduleError):
        yield problem.plan(replace(baseline, recompute=flags.recompute))
    with suppress(ScheduleError):
        plan = problem.plan(baseline, "1f1b" if baseline.placement.kind == "linear" else "interleaved-1f1b")
        yield replace(plan, timeline=as_megatron_recomputes(plan.timeline))


def flags_of_layout(flags: JobFlags, layout: Layout) -> Mapping[str, Any]:
    """The flags, by name, that fix `layout` in a job with these flags."""
    chosen: dict[str, Any] = {
        "pipeline_model_parallel_layout": to_layout(layout.partition, flags.mtp_num_layers),
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "zero_bubble_placement": layout.placement.kind,
        "zero_bubble_seed_by_layer": True,
        "zero_bubble_vocabulary_parallel": "on" if layout.vocabulary_parallel else "off",
    }
    if layout.recompute is Recompute.PLANNED:
        chosen["zero_bubble_recompute"] = str(Recompute.PLANNED)
    return chosen


def saved_choice(saved: Namespace, flags: JobFlags) -> ChosenLayout | None:
    """The layout that was chosen for the job which saved its arguments in a checkpoint.

    None if no layout was chosen for it, if it had other pipeline ranks or layers than a job with `flags`, or if these
    flags ask for another one, or do not allow what it recomputes or spreads.
    """
    chosen = {name: getattr(saved, name, None) for name in SAVED_NAMES}
    same = all(getattr(saved, name, None) == getattr(flags, name) for name in _KEPT_WITH)
    allowed = all(getattr(flags, name) in (None, False, "auto", value) for name, value in chosen.items())
    beyond_fsdp = chosen["zero_bubble_recompute"] is not None or chosen["zero_bubble_vocabulary_parallel"] == "on"
    if not same or not allowed or (flags.use_torch_fsdp2 and beyond_fsdp):
        return None
    return ChosenLayout(chosen) if chosen["zero_bubble_placement"] is not None else None


def _problem(flags: JobFlags, model: ModelCosts, baseline: Layout, free_bytes: float | None) -> LayoutProblem:
    """What is searched: all that the flags leave open, within the memory limit that they set."""
    name = flags.schedule
    assert name is not None
    capacity, activations = None if free_bytes is None else MARGIN * free_bytes, None
    limit = flags.memory_limit
    if limit is not None and limit.num_bytes is not None:
        activations = float(limit.num_bytes)
    elif limit is not None and limit.multiple is not None:
        peak = _peak(flags, model, baseline, limit)
        capacity = peak if capacity is None else min(capacity, peak)
    return LayoutProblem(
        model,
        flags.pipeline_model_parallel_size,
        flags.most_microbatches,
        schedule=name,
        placements=_placements(flags, name),
        recomputes=_recomputes(flags),
        capacity=capacity,
        activations=activations,
        group_size=flags.microbatch_group_size_per_virtual_pipeline_stage,
        post_validation=flags.interlocks_iterations,
    )


def _peak(flags: JobFlags, model: ModelCosts, baseline: Layout, limit: MemoryLimit) -> float:
    """The bytes of states, and as many times those of activations as the limit says, where 1F1B takes most of both.

    The limit is a multiple of the activations of 1F1B, or of interleaved 1F1B, with Megatron's split.
    """
    assert limit.multiple is not None
    num_ranks, num_microbatches = flags.pipeline_model_parallel_size, flags.most_microbatches
    problem = LayoutProblem(model, num_ranks, num_microbatches)
    if limit.is_interleaved and num_microbatches >= num_ranks:
        plan = problem.plan(baseline, "interleaved-1f1b")
    else:
        ranks = map(baseline.placement.stages_of, range(num_ranks))
        partition = tuple(sum(baseline.partition[stage] for stage in stages) for stages in ranks)
        plan = problem.plan(Layout(Placement("linear", num_ranks), partition, baseline.recompute), "1f1b")
    memory = zip(plan.states, plan.timeline.peak_memory, strict=True)
    return max(state + limit.multiple * activations for state, activations in memory)


def _megatrons_layout(flags: JobFlags) -> Layout:
    """The layout of Megatron's flags: as many layers on every stage, or as evenly as they can be spread.

    Where our schedule decides what is recomputed, megatron-core's own keeps everything.
    """
    chunks = flags.model_chunks or 1
    placement = Placement("linear" if chunks == 1 else "interleaved", flags.pipeline_model_parallel_size, chunks)
    recompute = Recompute.NONE if flags.recompute is Recompute.PLANNED else flags.recompute
    return Layout(placement, spread_layers(flags.num_layers, placement.num_stages), recompute)


def _placements(flags: JobFlags, name: str) -> tuple[Placement, ...]:
    """The placements that the flags leave to choose from."""
    num_ranks, kind = flags.pipeline_model_parallel_size, cast("PlacementKind | None", flags.zero_bubble_placement)
    if flags.model_chunks is not None:
        return (placement_for(name, num_ranks, flags.model_chunks, kind),)
    return tuple(placement for placement in all_placements(num_ranks) if kind is None or placement.kind == kind)


def _recomputes(flags: JobFlags) -> tuple[Recompute, ...]:
    """What the flags allow to recompute; if no flag says it, what has no room in the memory limit as well."""
    is_given = any(getattr(flags, name) is not None for name in (*RECOMPUTATION, "zero_bubble_recompute"))
    # R would use parameters that FSDP2 has not gathered.
    if is_given or flags.fp8 or flags.fp4 or flags.use_torch_fsdp2:
        return (flags.recompute,)
    return (Recompute.NONE, Recompute.PLANNED)
