"""Describes a layout in words, and returns the flags that fix a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron.zero_bubble.planner import Layout, Plan
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.layers import to_layout


def flags_of_layout(
    layout: Layout, num_further_tokens: int | None = None, pattern: HybridPattern | None = None
) -> Mapping[str, Any]:
    """The names and values of the flags that fix `layout` in a job.

    Args:
        num_further_tokens: the job's number of multi-token prediction layers.
        pattern: the layer pattern of a `HybridModel`; None for another model.
    """
    if pattern is None:
        where = {"pipeline_model_parallel_layout": to_layout(layout.partition, num_further_tokens)}
    else:
        where = {"hybrid_layer_pattern": str(pattern.divided(layout.partition))}
    chosen: dict[str, Any] = {
        **where,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "zero_bubble_placement": layout.placement.kind,
        "zero_bubble_seed_by_layer": True,
        "zero_bubble_vocabulary_parallel": "on" if layout.vocabulary_parallel else "off",
    }
    if layout.recompute is Recompute.PLANNED:
        chosen["zero_bubble_recompute"] = str(Recompute.PLANNED)
    return chosen


def named_plans(chosen: Plan, megatrons: Sequence[Plan], usual: str = "Megatron's split") -> list[tuple[str, Plan]]:
    """The rows of a table of layouts, as (name, plan): the chosen layout, the runners-up and Megatron's layout.

    The names of draft plans end in "draft" (see `Plan.is_draft`).

    Args:
        usual: text with which the name of Megatron's layout begins.
    """
    rows = [(f"chosen: {placement_words(chosen.layout)}", chosen)]
    rows += [(placement_words(plan.layout) + ", draft" * plan.is_draft, plan) for plan in chosen.others]
    return rows + [(f"{usual}, {plan.request.schedule}", plan) for plan in megatrons]


def gain_words(chosen: Plan, megatrons: Sequence[Plan]) -> str:
    """Text with the speedup of the plan `chosen` over each plan in `megatrons` (plans of Megatron's split)."""
    return ", ".join(f"{plan.time / chosen.time:.3f} under {plan.request.schedule}" for plan in megatrons)


def rehearsal_words(rehearsed: Sequence[tuple[Plan, float]], usual: Layout | None) -> str:
    """Text with the measured and the predicted speed of each plan, relative to the last plan.

    Args:
        rehearsed: pairs of a plan and its step time in milliseconds, which was measured in a short test run and scaled.
        usual: the layout that Megatron's flags give.
    """

    def name(plan: Plan) -> str:
        is_megatrons = plan.layout == usual
        return f"Megatron's split, {plan.request.schedule}" if is_megatrons else placement_words(plan.layout)

    *rivals, (last, of_last) = rehearsed
    speeds = (f"{of_last / time:.3f} (planned: {last.time / plan.time:.3f}) {name(plan)}" for plan, time in rivals)
    return f"times as fast as {name(last)}: {'; '.join(speeds)}"


def placement_words(layout: Layout) -> str:
    """The placement, vocabulary shards and recomputation of a layout, in words."""
    placement = layout.placement
    words = {"linear": "linear", "v": "V", "interleaved": f"interleaved, {placement.num_chunks} chunks"}[placement.kind]
    words += ", vocabulary shards" if layout.vocabulary_parallel else ""
    recomputed = {Recompute.NONE: "", Recompute.FULL: ", all recomputed", Recompute.PLANNED: ", R where needed"}
    return words + recomputed[layout.recompute]


def layers_words(layout: Layout, pattern: HybridPattern | None = None) -> str:
    """The layers of every stage in model order; `4x3` means three stages of four layers each.

    Args:
        pattern: the layer pattern of a `HybridModel`; if given, the text shows the symbols of the layers.
    """
    if pattern is not None:
        return " | ".join(pattern.divided(layout.partition).stages)
    runs = ((count, len(list(stages))) for count, stages in groupby(layout.partition))
    return " ".join(str(count) if times == 1 else f"{count}x{times}" for count, times in runs)
