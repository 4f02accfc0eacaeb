"""Flags that several commands share: the pipeline's size, its costs, and the output."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_args

from megatron.zero_bubble.cli.invocation import at_least, numbers, positive
from megatron.zero_bubble.cli.output import deliver
from megatron.zero_bubble.planner.request import MOST_CHUNKS
from megatron.zero_bubble.schedule import StageCosts
from megatron.zero_bubble.schedule.costs import VOCABULARY_COSTS
from megatron.zero_bubble.schedule.ir import PlacementKind
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.files import why_unwritable
from megatron.zero_bubble.session.flag_parser import flag
from megatron.zero_bubble.session.flags import flag_name

COSTS_OF_FLAGS = tuple(
    field.name for field in fields(StageCosts) if field.name not in ("memory_outside", *VOCABULARY_COSTS)
)
"""The fields of `StageCosts` that have a flag of the same name; the costs of vocabulary shards have no such flag."""
_PICTURES = (".svg", ".html", ".png", ".pdf")


@dataclass(frozen=True)
class CommandFlags:
    """Base class of a command's flags; a subclass refuses contradictory flags in its method `__post_init__`."""

    def __post_init__(self) -> None:
        """Raise `ValueError` with a message of one line if the flags contradict each other."""

    def refuse(self, names: Sequence[str], cause: str) -> None:
        """Raise `ValueError` if any flag of `names` is given; `cause` ends the message: the flag that excludes the
        others."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False:
                raise ValueError(f"argument {flag_name(name)}: not allowed with {cause}")


def check_output(path: Path | None, name: str = "--output") -> None:
    """Raise `ValueError`, before the command computes anything, if the file of the flag `name` cannot be written."""
    if path is not None and (problem := why_unwritable(path)) is not None:
        raise ValueError(f"argument {name}: {problem}")


@dataclass(frozen=True)
class FileFlags(CommandFlags):
    """output"""

    output: Path | None = flag("write to FILE instead of printing")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output(self.output)


@dataclass(frozen=True)
class ResultFlags(FileFlags):
    """output"""

    json: bool = flag("print JSON", False)
    draws: ClassVar[tuple[str, ...]] = ()
    """Suffixes of --output with which the command draws a picture, such as `.svg`."""

    def deliver(self, document: Any, text: str) -> None:
        """Print or write `document` as JSON if --json is given; otherwise, print or write `text`."""
        deliver(to_json(document) if self.json else text, self.output)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None and self.output.suffix in {*_PICTURES} - {*self.draws}:
            formats = ", ".join(("text", *self.draws))
            raise ValueError(f"argument --output: {self.output} is not possible: this command writes {formats} or JSON")


@dataclass(frozen=True)
class TableFlags(ResultFlags):
    """output"""

    markdown: bool = flag("write tables in Markdown", False)


@dataclass(frozen=True)
class SizeFlags(CommandFlags):
    """the pipeline"""

    pipeline_size: int = flag("pipeline ranks", MISSING, parse=at_least(2), metavar="P")
    num_microbatches: int = flag("microbatches of an iteration", MISSING, parse=at_least(1), metavar="M")
    num_chunks: int | None = flag(
        "model chunks per rank, for schedules that allow a choice", parse=at_least(1, MOST_CHUNKS), metavar="V"
    )
    microbatch_group_size: int | None = flag(
        "interleaved schedules: microbatches that pass a chunk before the next chunk's turn (default: P)",
        parse=at_least(1),
        metavar="N",
    )


def time_flag(operation: str, default: str = "1") -> Any:
    """Return the flag for the time of F, B or W; `operation` describes the operation in the help text."""
    return flag(f"time of {operation} of a microbatch (default: {default})", parse=numbers(above=0), metavar="T")


def _cost_flag(text: str, metavar: str = "T", at_least: float = 0) -> Any:
    return flag(text, parse=numbers(at_least), metavar=metavar)


def host_bandwidth_flag(of: str) -> Any:
    """Return the flag --host-bandwidth; the parameter `of` names the flag with which --host-bandwidth has an effect."""
    return flag(
        f"speed of a device's link to its host in each direction, in GB/s: with {of}, the times of copies follow from "
        "this speed instead of a measurement",
        parse=positive,
        metavar="X",
    )


@dataclass(frozen=True)
class CostFlags(CommandFlags):
    """costs of a whole rank with all its chunks: one number for all ranks, or a comma-separated list for the ranks"""

    time_f: tuple[float, ...] | None = time_flag("forward")
    time_b: tuple[float, ...] | None = time_flag("the gradient of the input")
    time_w: tuple[float, ...] | None = time_flag("the gradient of the weights")
    saved_bw: tuple[float, ...] | None = _cost_flag(
        "time that BW, which computes both gradients, saves compared with B and W (default: 0)"
    )
    time_r: tuple[float, ...] | None = _cost_flag("time of the recomputation of a microbatch (default: as F)")
    all_to_all_f: tuple[float, ...] | None = _cost_flag(
        "part of F's time in which tokens are exchanged between experts (default: 0); above 0, plans may run a forward "
        "and a backward as one operation, in which exchanges overlap with computation"
    )
    all_to_all_b: tuple[float, ...] | None = _cost_flag("the same part of B's time (default: 0)")
    time_comm: tuple[float, ...] | None = _cost_flag(
        "time of a message (default: 0); a list has P - 1 numbers, one for each pair of neighbouring ranks"
    )
    memory_f: tuple[float, ...] | None = _cost_flag("change of memory by F (default: 1)", "D", -math.inf)
    memory_b: tuple[float, ...] | None = _cost_flag("change of memory by B (default: -0.5)", "D", -math.inf)
    memory_w: tuple[float, ...] | None = _cost_flag("change of memory by W (default: -0.5)", "D", -math.inf)
    memory_r: tuple[float, ...] | None = _cost_flag(
        "memory that F drops and R allocates again, if there is an R (default: 15/16 of --memory-f)", "D"
    )
    time_d: tuple[float, ...] | None = _cost_flag(
        "time of the copy of a microbatch's activations to the host (default: 0)"
    )
    time_h: tuple[float, ...] | None = _cost_flag("time of the copy back (default: as --time-d)")
    memory_d: tuple[float, ...] | None = _cost_flag(
        "memory that D copies to the host and frees, if there is a D (default: 15/16 of --memory-f)", "D"
    )
    num_blocks: tuple[float, ...] | None = _cost_flag(
        "blocks of layers that can be recomputed one after the other (default: unknown; all at once)", "N"
    )
    vocabulary_parallel: float | None = flag(
        "spread embedding and output layer over all ranks; T is the time of F of the whole output layer, and also of "
        "its B and its W",
        parse=positive,
        metavar="T",
    )
    costs: Path | None = flag("read all costs from a JSON file (docs/commands.md)")
    host_bandwidth: float | None = host_bandwidth_flag("--costs FILE, a profile of a run")
    no_overlap_communication: bool = flag("sender and receiver compute nothing during a message", False)

    default_time: ClassVar[float] = 1
    """Default time of F, B and W."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.costs is not None:
            self.refuse((*COSTS_OF_FLAGS, "vocabulary_parallel"), "--costs")
        if self.host_bandwidth is not None and self.costs is None:
            raise ValueError("argument --host-bandwidth needs --costs FILE, a profile of a run; else give --time-d")

    @property
    def overlap_communication(self) -> bool:
        return not self.no_overlap_communication

    @property
    def time_unit(self) -> str:
        """The unit of a schedule's times: milliseconds or, if the flags give no times, the time of one F."""
        names = ("costs", *(name for name in COSTS_OF_FLAGS if name.startswith("time_")))
        return "F" if all(getattr(self, name) is None for name in names) else "ms"


@dataclass(frozen=True)
class LimitFlags(CommandFlags):
    """memory"""

    memory_limit: tuple[float, ...] | None = flag(
        "memory limit of a rank in M_B, the memory that one microbatch holds on a whole rank between F and B (the "
        "largest --memory-f); one number, or a comma-separated list with one for each rank",
        parse=numbers(above=0),
        metavar="L",
    )


def single_or_per_rank(limit: Sequence[float] | None) -> float | Sequence[float] | None:
    """Return the number in a limit with one number for all ranks; otherwise the limit, with a number for each rank."""
    return limit[0] if limit is not None and len(limit) == 1 else limit


@dataclass(frozen=True)
class RecomputeFlags(CommandFlags):
    """recomputation"""

    recompute: str | None = flag(
        "none: keep all activations; full: recompute all layers; planned: recompute as much as the memory limit "
        "requires (default: none)",
        choices=[recompute.value for recompute in Recompute],
    )

    @property
    def recomputation(self) -> Recompute:
        return Recompute.NONE if self.recompute is None else Recompute(self.recompute)


@dataclass(frozen=True)
class OffloadFlags(CommandFlags):
    """offload"""

    offload: str | None = flag(
        "auto: copy activations to the host and back if such copies make a plan within --memory-limit faster (default: "
        "off)",
        choices=("off", "auto"),
    )

    @property
    def offloads(self) -> bool:
        return self.offload == "auto"


@dataclass(frozen=True)
class PlacementFlags(SizeFlags):
    """the pipeline"""

    placement: PlacementKind | None = flag(
        "placement of the stages under the schedule auto (default: linear for one chunk per rank, else interleaved)",
        parse=str,
        choices=get_args(PlacementKind),
    )


@dataclass(frozen=True)
class ScheduleFlags(PlacementFlags, RecomputeFlags, OffloadFlags, CostFlags):
    """The flags that determine a schedule, except the memory limit."""


@dataclass(frozen=True)
class PostValidationFlags(CommandFlags):
    """iterations"""

    post_validation: bool = flag(
        "post-validation: run optimizer steps before the global gradient norm is known, and check in the next warmup "
        "(docs/post_validation.md)",
        False,
    )


def to_json(document: Any) -> str:
    return json.dumps(document, indent=1) + "\n"
