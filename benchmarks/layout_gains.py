"""Measure the gain from the choice of a layout, in real runs with emulated compute.

    python -m benchmarks.layout_gains --pipeline-size 8 --num-microbatches 32 --num-layers 32 --output-layers 2
    python -m benchmarks.layout_gains --pipeline-size 8 --num-microbatches 32 --num-layers 32 \\
        --output-layers 0.49 --output-layers 0.98 --output-layers 1.96 --output-layers 3.92

F, B and W of a layer take --time-f, --time-b and --time-w milliseconds. F, B and W of the output layer with the loss
each take --output-layers times as long as F of a layer: 0.49, 0.98, 1.96 and 3.92 for an 8B model with vocabularies of
32k, 64k, 128k and 256k, 5.7 for a hidden size of 3072 with a vocabulary of 256k. The memory limit is the peak memory of
1F1B with an even split of the layers. At least five layouts take turns, as in `benchmarks.emulate`. Three of the
layouts have whole layers and one stage a rank: 1F1B and `auto` with an even split, and `auto` with the best split. The
other layouts are the chosen layout, the next best layouts of the search, and the best layouts with embedding and output
layer spread over all ranks. --placement restricts the chosen layout and the layouts with a spread vocabulary to one
placement. Three columns have the speed relative to `auto` with the best split, to `auto` with the even split, and to
1F1B with the even split. The efficiency is the ideal time, in which all ranks do equal work and never wait, divided by
the measured time. For several values of --output-layers, the last line has the ratio of the largest to the smallest
efficiency of the best layouts with a spread vocabulary.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from itertools import islice
from typing import get_args

from benchmarks.emulation.emulated_results import Result, run_plans
from megatron.zero_bubble.cli.invocation import at_least, command, positive
from megatron.zero_bubble.cli.output import percent, table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.planner import Plan, PlanRequest, all_placements, plan_layout, search_layouts
from megatron.zero_bubble.planner.megatrons_split import as_megatron_runs, megatrons_layout
from megatron.zero_bubble.schedule import Timeline
from megatron.zero_bubble.schedule.ir import PlacementKind
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.session.flag_parser import flag
from megatron.zero_bubble.session.layout_words import layers_words, placement_words

_HEADS = (
    *("the output takes", "layout", "measured (ms)", "simulated", "above simulated", "idle"),
    *("to auto, linear", "to auto, even", "to 1F1B, even", "efficiency"),
)
_SPREAD = "vocabulary parallel"


@dataclass(frozen=True)
class LayoutFlags(TableFlags):
    """the model and the run"""

    pipeline_size: int = flag("pipeline ranks", MISSING, parse=at_least(2), metavar="P")
    num_microbatches: int = flag("microbatches of an iteration", MISSING, parse=at_least(1), metavar="M")
    num_layers: int = flag("layers, a multiple of the ranks", MISSING, parse=at_least(2), metavar="L")
    placement: PlacementKind | None = flag(
        "where chosen layouts have their stages (default: any)", None, parse=str, choices=get_args(PlacementKind)
    )
    time_f: float = flag("milliseconds of a layer's forward", 5.0, parse=positive, metavar="MS")
    time_b: float = flag("milliseconds of the gradient of its input", 5.0, parse=positive, metavar="MS")
    time_w: float = flag("milliseconds of the gradient of its weights", 4.0, parse=positive, metavar="MS")
    time_comm: float = flag("milliseconds that a plan takes for a message", 0.25, parse=positive, metavar="MS")
    output_layers: list[float] = flag(
        "how long the output takes, in layers; repeat for more", MISSING, parse=positive, action="append", metavar="N"
    )
    steps: int = flag("measured steps of each layout", 5, parse=at_least(1), metavar="N")


def model_of(flags: LayoutFlags, output_layers: float) -> ModelCosts:
    """Return the costs of the units of the model; the unit of memory is the activation memory of one layer."""
    layer = UnitCosts(flags.time_f, flags.time_b, flags.time_w, memory_f=1, memory_b=-0.5, memory_w=-0.5)
    time = output_layers * flags.time_f
    output = UnitCosts(time, time, time, memory_f=0.5, memory_b=-0.2, memory_w=-0.3)
    embedding = UnitCosts(0.01 * flags.time_f, 0, 0.01 * flags.time_f)
    return ModelCosts(embedding, (layer,) * flags.num_layers, output, flags.time_comm)


def request_of(flags: LayoutFlags, output_layers: float) -> tuple[PlanRequest, Plan]:
    """Return the request for a layout, with the memory of 1F1B as limit, and the plan of 1F1B with the even split.

    Raises `ScheduleError` if the model has too few layers.
    """
    size = flags.pipeline_size
    placements = tuple(one for one in all_placements(size) if flags.placement in (None, one.kind))
    request = PlanRequest("auto", flags.num_microbatches, placements, model_of(flags, output_layers))
    baseline = as_megatron_runs(request, megatrons_layout(flags.num_layers, size))
    return replace(request, capacity=baseline.memory), baseline


def plans_of(flags: LayoutFlags, output_layers: float) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of the layouts that take turns; the others are compared with the first three."""
    request, baseline = request_of(flags, output_layers)
    even, linear = baseline.layout, baseline.layout.placement
    yield "1F1B, even split", baseline
    yield "auto, even split", plan_layout(request, even)
    best = search_layouts(replace(request, placements=(linear,)))
    yield f"auto, best linear split: {layers_words(best.layout)}", best
    chosen = search_layouts(request)
    for word, plan in (("chosen", chosen), *(("runner-up", other) for other in chosen.others)):
        if plan.layout != best.layout:
            yield f"{word}: {words_of(plan)}", plan
    best = search_layouts(replace(request, vocabulary_parallel=True))
    yield f"{_SPREAD}: {words_of(best)}", best
    for plan in best.others if best.layout.placement != linear else ():
        if plan.layout.placement == linear:
            yield f"{_SPREAD}: {words_of(plan)}", plan


def words_of(plan: Plan) -> str:
    """Return, as text, the placement of the plan and the numbers of layers of its stages."""
    return f"{placement_words(plan.layout)}: {layers_words(plan.layout)}"


@command("benchmarks.layout_gains", LayoutFlags, __doc__)
def main(flags: LayoutFlags) -> None:
    named = {size: list(plans_of(flags, size)) for size in flags.output_layers}
    timelines = [_named(f"{size:g}: {name}", plan.timeline) for size, plans in named.items() for name, plan in plans]
    total = (1 + flags.steps) * sum(float(timeline.makespan) for timeline in timelines) / 1e3
    print(f"layouts: {len(timelines)}, steps of each: {flags.steps}, about {total:.0f} s", file=sys.stderr)
    results = iter(run_plans(timelines, flags.steps))
    by_size = [list(islice(results, len(plans))) for plans in named.values()]
    document = [
        {**result.as_json(), "ideal_ms": _ideal(result), "efficiency": _efficiency(result)}
        for results in by_size
        for result in results
    ]
    flags.deliver(document, layouts_table(by_size, markdown=flags.markdown))


def _named(name: str, timeline: Timeline) -> Timeline:
    return replace(timeline, schedule=replace(timeline.schedule, name=name))


def _ideal(result: Result) -> float:
    return float(sum(result.timeline.work)) / len(result.timeline.work)


def _efficiency(result: Result) -> float:
    return _ideal(result) / result.measured


def layouts_table(by_size: Sequence[Sequence[Result]], *, markdown: bool = False) -> str:
    """Return the table of the results of all layouts, for each value of --output-layers."""
    rows = [
        (
            *result.name.split(": ", 1),
            f"{result.measured:.1f}",
            f"{result.simulated:.1f}",
            f"{100 * (result.measured / result.simulated - 1):+.1f}%",
            percent(result.timeline.idle.total),
            *(f"{other.measured / result.measured:.3f}" for other in reversed(results[:3])),
            f"{_efficiency(result):.3f}",
        )
        for results in by_size
        for result in results
    ]
    spread = [next(_efficiency(result) for result in results if _SPREAD in result.name) for results in by_size]
    ratio = f"\nlargest to smallest: {max(spread) / min(spread):.3f}\n" if len(spread) > 1 else ""
    return table(_HEADS, rows, markdown=markdown) + ratio


if __name__ == "__main__":
    sys.exit(main())
