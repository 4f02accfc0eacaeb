"""Measure the gain from the choice of a layout, in real runs with emulated compute.

    python -m benchmarks.layout_gains --pipeline-size 8 --num-microbatches 32 --num-layers 32 --output-layers 2
    python -m benchmarks.layout_gains --pipeline-size 8 --num-microbatches 32 --num-layers 32 --output-layers 5.7

F, B and W of a layer take --time-f, --time-b and --time-w milliseconds. F, B and W of the output layer with the loss
each take --output-layers times as long as F of a layer: 1.96 for an 8B model with a vocabulary of 128k, 5.7 for a
hidden size of 3072 with a vocabulary of 256k. The memory limit is the peak memory of 1F1B with an even split of the
layers. At least five layouts take turns, as in `benchmarks.emulate`. Three of the layouts have whole layers and one
stage a rank: 1F1B and `auto` with an even split, and `auto` with the best split. The other layouts are the chosen
layout, the next best layouts of the search, and the best layouts with embedding and output layer spread over all ranks.
--placement restricts the chosen layout and the layouts with a spread vocabulary to one placement. The last columns have
the speed relative to `auto` with the best split, to `auto` with the even split, and to 1F1B with the even split.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import get_args

from benchmarks.emulation.emulated_results import Result, run_plans
from megatron.zero_bubble.cli.invocation import at_least, positive, read_flags, run_command
from megatron.zero_bubble.cli.output import percent, table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.planner import Plan, PlanRequest, all_placements, plan_layout, search_layouts
from megatron.zero_bubble.planner.megatrons_split import as_megatron_runs, megatrons_layout
from megatron.zero_bubble.schedule import Timeline
from megatron.zero_bubble.schedule.ir import PlacementKind
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts
from megatron.zero_bubble.session.flag_parser import flag
from megatron.zero_bubble.session.layout_words import layers_words, placement_words

_PROG = "benchmarks.layout_gains"
_HEADS = (
    *("layout", "measured (ms)", "simulated", "above simulated", "idle"),
    *("to auto, linear", "to auto, even", "to 1F1B, even"),
)


@dataclass(frozen=True)
class RunFlags(TableFlags):
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
    steps: int = flag("measured steps of each layout", 5, parse=at_least(1), metavar="N")


@dataclass(frozen=True)
class LayoutFlags(RunFlags):
    """the output layer"""

    output_layers: float = flag("how long the output takes, in layers", MISSING, parse=positive, metavar="N")


def model_of(flags: RunFlags, output_layers: float) -> ModelCosts:
    """Return the costs of the units of the model; the unit of memory is the activation memory of one layer."""
    layer = UnitCosts(flags.time_f, flags.time_b, flags.time_w, memory_f=1, memory_b=-0.5, memory_w=-0.5)
    time = output_layers * flags.time_f
    output = UnitCosts(time, time, time, memory_f=0.5, memory_b=-0.2, memory_w=-0.3)
    embedding = UnitCosts(0.01 * flags.time_f, 0, 0.01 * flags.time_f)
    return ModelCosts(embedding, (layer,) * flags.num_layers, output, flags.time_comm)


def request_of(flags: RunFlags, output_layers: float) -> tuple[PlanRequest, Plan]:
    """Return the request for a layout, with the memory of 1F1B as limit, and the plan of 1F1B with the even split.

    Raises `ScheduleError` if the model has too few layers.
    """
    size = flags.pipeline_size
    placements = tuple(one for one in all_placements(size) if flags.placement in (None, one.kind))
    request = PlanRequest("auto", flags.num_microbatches, placements, model_of(flags, output_layers))
    baseline = as_megatron_runs(request, megatrons_layout(flags.num_layers, size))
    return replace(request, capacity=baseline.memory), baseline


def plans_of(flags: LayoutFlags) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of the layouts that take turns; the others are compared with the first three."""
    request, baseline = request_of(flags, flags.output_layers)
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
    yield f"vocabulary parallel: {words_of(best)}", best
    for plan in best.others if best.layout.placement != linear else ():
        if plan.layout.placement == linear:
            yield f"vocabulary parallel: {words_of(plan)}", plan


def words_of(plan: Plan) -> str:
    """Return, as text, the placement of the plan and the numbers of layers of its stages."""
    return f"{placement_words(plan.layout)}: {layers_words(plan.layout)}"


def main(argv: list[str] | None = None) -> int:
    return run_command(_PROG, lambda: _measure(sys.argv[1:] if argv is None else argv))


def _measure(argv: list[str]) -> None:
    flags = read_flags(LayoutFlags, argv, _PROG, __doc__ or "")
    results = run_named(plans_of(flags), flags.steps)
    flags.deliver([result.as_json() for result in results], layouts_table(results, markdown=flags.markdown))


def run_named(plans: Iterable[tuple[str, Plan]], steps: int) -> list[Result]:
    """Run the plans `steps` times in turns, with the given names."""
    timelines = [_named(name, plan.timeline) for name, plan in plans]
    total = (1 + steps) * sum(float(timeline.makespan) for timeline in timelines) / 1e3
    print(f"layouts: {len(timelines)}, steps of each: {steps}, about {total:.0f} s", file=sys.stderr)
    return run_plans(timelines, steps)


def _named(name: str, timeline: Timeline) -> Timeline:
    return replace(timeline, schedule=replace(timeline.schedule, name=name))


def layouts_table(results: Sequence[Result], *, markdown: bool = False) -> str:
    one_f_one_b, even, linear = (result.measured for result in results[:3])
    rows = [
        (
            result.name,
            f"{result.measured:.1f}",
            f"{result.simulated:.1f}",
            f"{100 * (result.measured / result.simulated - 1):+.1f}%",
            percent(result.timeline.idle.total),
            f"{linear / result.measured:.3f}",
            f"{even / result.measured:.3f}",
            f"{one_f_one_b / result.measured:.3f}",
        )
        for result in results
    ]
    return table(_HEADS, rows, markdown=markdown)


if __name__ == "__main__":
    sys.exit(main())
