"""Says which layout was chosen for a job, what the others would take, and which flags repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from megatron.zero_bubble.job.flags import flag_name
from megatron.zero_bubble.job.layout_choice import LayoutChoice
from megatron.zero_bubble.schedule.layouts import Layout, LayoutPlan
from megatron.zero_bubble.schedule.recomputation import Recompute


def layout_lines(choice: LayoutChoice, flags: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table of the chosen layout, the runners-up and Megatron's split.

    Args:
        flags: the flags, by name, that fix the chosen layout.
    """
    chosen = choice.chosen
    yield (
        f" > layout chosen from the costs of single layers, for {chosen.timeline.schedule.num_ranks} ranks and "
        f"{chosen.timeline.schedule.num_microbatches} microbatches"
    )
    rows = [("chosen", chosen), *(("", plan) for plan in choice.plans[1:])]
    rows += [("Megatron's split", plan) for plan in choice.megatrons]
    described = [_cells(name, plan) for name, plan in rows]
    heads = ("", "placement", "schedule", "layers of each stage", "time (ms)", "bubble", "idle", "fullest rank (MiB)")
    widths = [max(map(len, column)) for column in zip(heads, *described, strict=True)]
    for cells in (heads, *described):
        padded = (
            cell.ljust(width) if index < 4 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield f"     {'  '.join(padded)}".rstrip()
    for plan in choice.megatrons:
        yield (
            f"     {plan.time / chosen.time:.3f} times as fast as Megatron's split with {plan.timeline.schedule.name}"
        )
    given = " ".join(_given(name, value) for name, value in flags.items() if value is not None)
    yield f"     the same layout in another run: {given}"


def _cells(name: str, plan: LayoutPlan) -> tuple[str, ...]:
    timeline = plan.timeline
    return (
        name,
        placement_words(plan.layout),
        timeline.schedule.name,
        layers_words(plan.layout),
        f"{plan.time:.1f}",
        f"{timeline.bubble_rate:.2%}",
        f"{timeline.idle.total:.2%}",
        f"{plan.memory / 2**20:.1f}",
    )


def placement_words(layout: Layout) -> str:
    """The placement and what is recomputed, in words."""
    placement = layout.placement
    words = {"linear": "linear", "v": "V", "interleaved": f"interleaved, {placement.num_chunks} chunks"}[placement.kind]
    return (
        words
        + {Recompute.NONE: "", Recompute.FULL: ", all recomputed", Recompute.PLANNED: ", R where needed"}[
            layout.recompute
        ]
    )


def layers_words(layout: Layout) -> str:
    """The layers of every stage in model order; `4x3` are three stages of four layers."""
    runs = ((count, len(list(stages))) for count, stages in groupby(layout.partition))
    return " ".join(str(count) if times == 1 else f"{count}x{times}" for count, times in runs)


def _given(name: str, value: object) -> str:
    """A flag as the user writes it."""
    return flag_name(name) if value is True else f"{flag_name(name)} {shlex.quote(str(value))}"
