"""Choose the layout and the schedule of a model, as a job with `--zero-bubble` does, but with costs from a file.

    zero-bubble plan --costs units.json --pipeline-size 4 --num-microbatches 16
    zero-bubble plan --costs units.json --pipeline-size 4 --num-microbatches 16 --memory-limit 1.5 --json

    zero-bubble plan --costs units.json --pipeline-size 4 --num-microbatches 16 --own-layers 9,8,8,7

The file of --costs has the costs of the embedding, of every layer and of the output (docs/commands.md); a job
writes this file with --zero-bubble-unit-costs-output. The table shows the chosen plan first, then plans of other
combinations of placement, recomputation and vocabulary sharding. A combination that is clearly slower has only a draft
plan; give its flags, such as --placement, for its best plan. The last rows of the table show Megatron's split of the
layers, with a schedule of this planner and with megatron-core's own schedule. With --own-layers, your own layout
replaces Megatron's split, and is chosen unless another layout is at least 2% faster. Times and memory have the units of
the file of costs. `zero-bubble plan` trains nothing and does not need torch.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, replace
from operator import add
from pathlib import Path
from typing import Any, get_args

from megatron.zero_bubble.cli.invocation import at_least, command
from megatron.zero_bubble.cli.output import percent, table_of
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.planner import Layout, Plan, PlanRequest, all_placements, search_layouts
from megatron.zero_bubble.planner.megatrons_split import (
    capacity_of_multiple,
    megatrons_layout,
    memory_of_ranks,
    on_megatrons_split,
)
from megatron.zero_bubble.planner.memory_limit import MemoryLimit, bytes_with_unit, rounded_up
from megatron.zero_bubble.planner.request import MOST_CHUNKS
from megatron.zero_bubble.schedule.costs import LARGEST
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.formats import units_from_json
from megatron.zero_bubble.schedule.ir import Placement, PlacementKind
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.files import read_file, reading
from megatron.zero_bubble.session.flag_parser import flag
from megatron.zero_bubble.session.flags import flag_name, flags_text
from megatron.zero_bubble.session.job_flags import FULL_RECOMPUTATION
from megatron.zero_bubble.session.layout_words import flags_of_layout, gain_words, layers_words, named_plans
from megatron.zero_bubble.session.progress_lines import ProgressLines

_PROG = "zero-bubble plan"


def _memory_limit(text: str) -> MemoryLimit:
    try:
        return MemoryLimit.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def _layers(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() and len(number) < 7 for number in numbers):
        raise ArgumentTypeError(f"must be the layers of each stage, such as 9,8,8,7, got {text}")
    return tuple(map(int, numbers))


@dataclass(frozen=True)
class PlanFlags(TableFlags):
    """the model and the pipeline"""

    costs: Path = flag("JSON file with the costs of the model's units", MISSING)
    pipeline_size: int = flag("pipeline ranks", MISSING, parse=at_least(2), metavar="P")
    num_microbatches: int = flag("microbatches of an iteration", MISSING, parse=at_least(1), metavar="M")
    memory_limit: MemoryLimit = flag(
        "memory limit of a rank: a multiple (1.5) of the activations of 1F1B, or interleaved 1F1B, on Megatron's split "
        "or your own layout, added to the fullest rank's states; or bytes (40GiB) for states and activations; or auto "
        "for no limit",
        "1",
        parse=_memory_limit,
        metavar="L",
    )
    placement: PlacementKind | None = flag(
        "placement of the stages on ranks (default: the fastest)", parse=str, choices=get_args(PlacementKind)
    )
    num_chunks: int | None = flag(
        "model chunks per rank (default: the fastest number)", parse=at_least(1, MOST_CHUNKS), metavar="V"
    )
    recompute: str | None = flag(
        "none: keep all activations; full: recompute all layers; planned: recompute as much as the memory limit "
        "requires (default: the faster of none and planned)",
        choices=[recompute.value for recompute in Recompute],
    )
    vocabulary_parallel: str = flag(
        "whether embedding and output layer are spread over all ranks", "auto", choices=["on", "off", "auto"]
    )

    own_layers: tuple[int, ...] | None = flag(
        "layers of each stage of your own layout, in model order, such as 9,8,8,7; several stages per rank are "
        "interleaved, unless --own-placement is v",
        parse=_layers,
        metavar="N,...",
    )
    own_placement: PlacementKind | None = flag(
        "placement of the stages of your own layout (default: linear or interleaved, as in Megatron)",
        parse=str,
        choices=get_args(PlacementKind),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own_placement is not None and self.own_layers is None:
            raise ValueError(f"argument --own-placement {self.own_placement} needs --own-layers")

    def usual_layout(self, num_layers: int, recompute: Recompute) -> Layout:
        """Return the layout of --own-layers or, without this flag, Megatron's layout."""
        if self.own_layers is None:
            try:
                return megatrons_layout(num_layers, self.pipeline_size, recompute=recompute)
            except ScheduleError as error:
                raise ValueError(f"argument --pipeline-size {self.pipeline_size}: {error}") from None
        given = f"argument --own-layers {','.join(map(str, self.own_layers))}"
        chunks, rest = divmod(len(self.own_layers), self.pipeline_size)
        kind = self.own_placement or ("linear" if chunks == 1 else "interleaved")
        if rest or chunks not in {"linear": (1,), "v": (2,), "interleaved": range(2, MOST_CHUNKS + 1)}[kind]:
            raise ValueError(f"{given} has {len(self.own_layers)} stages, which {self.pipeline_size} ranks cannot hold")
        if sum(self.own_layers) != num_layers:
            raise ValueError(f"{given} has {sum(self.own_layers)} layers, but --costs {self.costs} has {num_layers}")
        return Layout(Placement(kind, self.pipeline_size, chunks), self.own_layers, recompute)

    @property
    def usual_name(self) -> str:
        return "Megatron's split" if self.own_layers is None else "your own layout"

    def placements(self, num_layers: int, usual: Placement) -> tuple[Placement, ...]:
        """Return all placements that --placement and --num-chunks allow, including `usual` if these flags allow it."""
        chunks, size = self.num_chunks, self.pipeline_size
        possible = tuple(dict.fromkeys((*all_placements(size, num_layers), usual)))
        if chunks is not None and chunks > 1:
            possible = (Placement("interleaved", size, chunks), Placement("v", size, 2))
        allowed = tuple(
            placement
            for placement in possible
            if self.placement in (None, placement.kind) and chunks in (None, placement.num_chunks)
        )
        if not allowed:
            needed = {"linear": "1 chunk a rank", "v": "2 chunks a rank", "interleaved": "at least 2 chunks a rank"}
            raise ValueError(
                f"argument --num-chunks {chunks}: --placement {self.placement} has {needed[str(self.placement)]}"
            )
        return allowed


@command(_PROG, PlanFlags, __doc__)
def main(flags: PlanFlags) -> None:
    request = request_of(flags)
    progress = ProgressLines(lambda text: print(f"{_PROG}: {text}", file=sys.stderr, flush=True))
    try:
        chosen = search_layouts(request, progress)
    except Infeasible as error:
        limit = flags.memory_limit
        given = f"{limit.num_bytes}B" if limit.multiple is None else f"{limit.multiple:g}"
        enough = _sufficient_limit(request, flags, error.smallest_limit)
        raise ValueError(
            f"argument --memory-limit {given}: no layout fits: {error} (--memory-limit {enough})"
        ) from None
    except ScheduleError as error:
        sizes = {name: getattr(flags, name) for name in ("pipeline_size", "placement", "num_chunks")}
        given = " ".join(f"{flag_name(name)} {size}" for name, size in sizes.items() if size is not None)
        raise ValueError(f"arguments {given}: {error}") from None
    usual = on_megatrons_split(request, chosen)
    document = {
        "flags": _chosen_flags(chosen.layout),
        "memory_limit": request.capacity,
        "layouts": [plan_as_json(plan) for plan in (chosen, *chosen.others)],
        flags.usual_name.replace("'", "").replace(" ", "_").lower(): [plan_as_json(plan) for plan in usual],
    }
    flags.deliver(document, _as_text(request, chosen, usual, flags))


def request_of(flags: PlanFlags) -> PlanRequest:
    """Return the `PlanRequest` that the flags describe; its reference layout is --own-layers or Megatron's split.

    Raises:
        ValueError: the file of costs cannot be read, or the layers cannot be divided as the flags demand.
    """
    with reading(f"argument --costs {flags.costs}"):
        model = units_from_json(read_file(flags.costs))
    # Pairs of F and B work neither with recomputation nor with vocabulary shards, whose flags exclude pairs.
    pairs = model.has_all_to_all and flags.recompute in (None, "none") and flags.vocabulary_parallel != "on"
    by_default = (Recompute.NONE,) if pairs else (Recompute.NONE, Recompute.PLANNED)
    recompute = by_default if flags.recompute is None else (Recompute(flags.recompute),)
    usual_recompute = Recompute.FULL if recompute == (Recompute.FULL,) else Recompute.NONE
    usual = flags.usual_layout(len(model.layers), usual_recompute)
    request = PlanRequest(
        "auto",
        flags.num_microbatches,
        flags.placements(len(model.layers), usual.placement),
        model,
        usual=usual,
        recomputes=recompute,
        vocabulary_parallel={"on": True, "off": False, "auto": False if pairs else None}[flags.vocabulary_parallel],
        takes_makespan=True,
        pairs=pairs,
    )
    limit = flags.memory_limit
    if limit.is_auto:  # Without any limit in the request, a schedule keeps to the memory of 1F1B.
        return replace(request, memory_limit=LARGEST)
    if limit.multiple is not None:
        is_interleaved = usual.placement.kind == "interleaved"
        capacity = capacity_of_multiple(request, usual, limit.multiple, is_interleaved=is_interleaved)
        return replace(request, capacity=capacity)
    return replace(request, capacity=limit.num_bytes)


def _sufficient_limit(request: PlanRequest, flags: PlanFlags, capacity: float) -> str:
    """Return the value of --memory-limit for a memory limit of `capacity`, in the unit of the given --memory-limit."""
    assert request.usual is not None
    memory = memory_of_ranks(request, request.usual, is_interleaved=request.usual.placement.kind == "interleaved")
    multiples = [(capacity - state) / activations for state, activations in memory if activations > 0]
    if flags.memory_limit.multiple is None or not multiples or min(multiples) <= 0:
        return bytes_with_unit(capacity)
    return rounded_up(min(multiples))


def _chosen_flags(layout: Layout) -> str:
    """Return the flags of a job that runs the layout."""
    return flags_text({**flags_of_layout(layout), **(FULL_RECOMPUTATION if layout.recompute is Recompute.FULL else {})})


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return the layout, time and memory of a plan as JSON; memory is given for each rank, with model states."""
    layout, timeline = plan.layout, plan.timeline
    return {
        "placement": layout.placement.kind,
        "chunks": layout.placement.num_chunks,
        "partition": list(layout.partition),
        "recompute": layout.recompute.value,
        "vocabulary_parallel": layout.vocabulary_parallel,
        "schedule": plan.request.schedule,
        "is_draft": plan.is_draft,
        "time": float(plan.time),
        "bubble": float(timeline.bubble_rate),
        "idle": float(timeline.idle.total),
        "memory": list(map(add, plan.states, plan.activations or timeline.peak_memory)),
    }


def _as_text(request: PlanRequest, chosen: Plan, usual: Sequence[Plan], flags: PlanFlags) -> str:
    columns: dict[str, Callable[[tuple[str, Plan]], str]] = {
        "layout": lambda named: named[0],
        "layers of each stage": lambda named: layers_words(named[1].layout),
        "time": lambda named: f"{named[1].time:.6g}",
        "bubble": lambda named: percent(named[1].timeline.bubble_rate),
        "idle": lambda named: percent(named[1].timeline.idle.total),
        "fullest rank": lambda named: f"{named[1].memory:.6g}",
    }
    limit = "no limit" if request.capacity is None else f"{request.capacity:.6g}"
    lines = [f"memory limit of a rank, states included: {limit}"]
    if usual:
        lines.append(f"speed relative to {flags.usual_name}: {gain_words(chosen, usual)}")
    lines.append(f"flags: {_chosen_flags(chosen.layout)}")
    rows = named_plans(chosen, usual, flags.usual_name)
    return table_of(columns, rows, markdown=flags.markdown) + "\n".join(lines) + "\n"
