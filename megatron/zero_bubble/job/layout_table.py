"""Says which layout was chosen for a job, what the others would take, and which flags repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.zero_bubble.job.flags import flags_text
from megatron.zero_bubble.job.layout_choice import LayoutChoice
from megatron.zero_bubble.job.layout_words import gain_words, layers_words, named_plans
from megatron.zero_bubble.planner import Plan
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts


def layout_lines(choice: LayoutChoice, flags: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table of the chosen layout, the runners-up and Megatron's split.

    Args:
        flags: the flags, by name, that fix the chosen layout.
    """
    chosen = choice.plan
    schedule = chosen.timeline.schedule
    yield f" > layout chosen for {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches"
    yield f"     F + B + W of a microbatch (ms): {'; '.join(_unit_words(choice.model))}"
    described = [(name, *_cells(plan)) for name, plan in named_plans(chosen, choice.megatrons)]
    heads = ("", "layers of each stage", "time (ms)", "bubble", "idle", "fullest rank (MiB)")
    widths = [max(map(len, column)) for column in zip(heads, *described, strict=True)]
    for cells in (heads, *described):
        names = (cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True))
        figures = (cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True))
        yield f"     {'  '.join((*names, *figures))}"
    if choice.megatrons:
        yield f"     as fast as, with Megatron's split: {gain_words(chosen, choice.megatrons)}"
    yield f"     the same layout in another run: {flags_text(flags)}"


def _unit_words(model: ModelCosts) -> Iterator[str]:
    """What each kind of unit takes; layers that cost the same are one kind."""
    for layer in dict.fromkeys(model.layers):
        yield f"{model.layers.count(layer)} layers {_times(layer)} each"
    yield f"embedding {_times(model.embedding)}"
    yield f"output {_times(model.output)}"
    yield f"a message {model.time_comm:.2f}"


def _times(unit: UnitCosts) -> str:
    return " + ".join(f"{time:.2f}" for time in (unit.time_f, unit.time_b, unit.time_w))


def _cells(plan: Plan) -> tuple[str, ...]:
    """The columns after the name."""
    timeline = plan.timeline
    return (
        layers_words(plan.layout),
        f"{plan.time:.1f}",
        f"{timeline.bubble_rate:.2%}",
        f"{timeline.idle.total:.2%}",
        f"{plan.memory / 2**20:.1f}",
    )
