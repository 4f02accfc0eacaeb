"""The flags of `zero-bubble schedule`, with one class for each of its commands."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.invocation import at_least, numbers, positive
from megatron.zero_bubble.cli.shared_flags import (
    CommandFlags,
    FileFlags,
    LimitFlags,
    PostValidationFlags,
    ResultFlags,
    ScheduleFlags,
    TableFlags,
    check_output,
)
from megatron.zero_bubble.planner import names
from megatron.zero_bubble.schedule import HardwareQueues
from megatron.zero_bubble.schedule.draw.drawing import MAX_WIDTH
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.flag_parser import flag
from megatron.zero_bubble.session.flags import flag_name

_SIZES = ("pipeline_size", "num_microbatches")
_NOT_WITH_INPUT = (*_SIZES, "num_chunks", "placement", "microbatch_group_size", "memory_limit", "recompute", "offload")
FORMATS = {"": "grid", ".txt": "grid", ".json": "json", ".csv": "csv"}
"""Suffix of a file name -> the format in which `generate` writes a schedule to the file."""


@dataclass(frozen=True)
class SourceFlags(ScheduleFlags, LimitFlags):
    """the schedule"""

    schedule: str | None = flag(
        f"one of {', '.join(names())}; auto has the lowest bubble rate here, and in jobs and zero-bubble plan the "
        "shortest time",
        metavar="NAME",
    )
    input: Path | None = flag("read the schedule from FILE: JSON, CSV or PyTorch's CSV")
    # The sizes of a schedule in a file are known; without a file, `__post_init__` requires both flags.
    pipeline_size: int = flag("pipeline ranks, with --schedule", parse=at_least(2), metavar="P")
    num_microbatches: int = flag("microbatches of an iteration, with --schedule", parse=at_least(1), metavar="M")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule is None and self.input is None:
            raise ValueError("one of the arguments --schedule --input is required")
        if self.schedule is not None and self.input is not None:
            raise ValueError("argument --input: not allowed with argument --schedule")
        if self.input is not None:
            self.refuse(_NOT_WITH_INPUT, "--input, whose schedule determines it")
        for name in _SIZES:
            if self.input is None and getattr(self, name) is None:
                raise ValueError(f"argument {flag_name(name)} is required with --schedule")


@dataclass(frozen=True)
class QueueFlags(CommandFlags):
    """the device"""

    hardware_queues: str | None = flag(
        "simulate NCCL's streams on GPUs with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) or with many "
        "(default: messages never wait for a stream)",
        choices=[queues.value for queues in HardwareQueues],
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Every command with --hardware-queues also has the flag --no-overlap-communication.
        if self.hardware_queues is not None and getattr(self, "no_overlap_communication", False):
            raise ValueError(
                "argument --hardware-queues: not allowed with --no-overlap-communication: messages on streams overlap"
            )

    @property
    def queues(self) -> HardwareQueues | None:
        return None if self.hardware_queues is None else HardwareQueues(self.hardware_queues)


@dataclass(frozen=True)
class SimulationFlags(SourceFlags, QueueFlags, PostValidationFlags):
    """iterations"""

    steps: int = flag(
        "iterations to simulate; more than 1 needs --post-validation, because only then do iterations overlap",
        1,
        parse=at_least(1),
        metavar="N",
    )
    lengths: tuple[float, ...] = flag(
        "relative length of every microbatch, for example 1,4,1,1; a microbatch's times and memory are proportional to "
        "its length, and the other flags give the costs at the mean length (default: equal lengths)",
        (),
        parse=numbers(above=0),
        metavar="L,L,...",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("post_validation", "hardware_queues"):
            if self.lengths and getattr(self, name):
                raise ValueError(f"argument --lengths: not allowed with {flag_name(name)}")


@dataclass(frozen=True)
class GenerateFlags(SourceFlags, PostValidationFlags, FileFlags):
    """format"""

    format: str | None = flag(
        "output format (default: by the suffix of --output, else grid)", choices=("grid", "json", "csv", "pytorch")
    )
    lower: bool = flag("add sends and receives (formats json and pytorch)", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format is None and self.output is not None and self.output.suffix not in FORMATS:
            raise ValueError(
                f"argument --output: the suffix of {self.output} stands for no format: use .json, .csv or .txt, or "
                "give --format"
            )
        if self.lower and self.chosen_format not in ("json", "pytorch"):
            raise ValueError(
                f"argument --lower: format {self.chosen_format} has no sends and receives: use json or pytorch"
            )

    @property
    def chosen_format(self) -> str:
        """The output format: the value of --format or, without this flag, the format for the suffix of --output."""
        return self.format or FORMATS["" if self.output is None else self.output.suffix]


@dataclass(frozen=True)
class SimulateFlags(SimulationFlags, ResultFlags):
    """output"""


@dataclass(frozen=True)
class CompareFlags(ScheduleFlags, LimitFlags, QueueFlags, PostValidationFlags, TableFlags):
    """the schedules"""

    schedule: list[str] | None = flag(
        "schedule to compare; may be repeated (default: all)", action="append", metavar="NAME"
    )


@dataclass(frozen=True)
class DrawFlags(SimulationFlags):
    """the picture"""

    output: Path = flag("file to write: .svg, .html, or .json for Perfetto", MISSING)
    width: int | None = flag(
        "width of an SVG or HTML page (default: by its contents)", parse=at_least(200, MAX_WIDTH), metavar="PIXELS"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_output(self.output)


@dataclass(frozen=True)
class ValidateFlags(SourceFlags, ResultFlags):
    """output"""


def _limit(default: float | None, quantity: str) -> Any:
    return flag(f"{quantity}, in units of p M_B (1F1B's peak)", default, parse=positive, metavar="X")


@dataclass(frozen=True)
class CurveFlags(ScheduleFlags, ResultFlags):
    """the curves"""

    schedule: list[str] | None = flag(
        "schedule to plan; may be repeated (default: auto)", action="append", metavar="NAME"
    )
    from_: float = _limit(None, "smallest memory limit (default: 0.5, with --recompute or --dial 0.125)")
    to: float = _limit(2.5, "largest memory limit")
    step: float = _limit(0.125, "difference of successive limits")
    dial: bool = flag(
        "show times instead of bubble rates, for plans that keep all activations, may recompute activations, may copy "
        "activations to the host, or may do both",
        False,
    )
    output: Path | None = flag("write to FILE instead of printing; with suffix .svg: plot there and print")

    draws = (".svg",)

    @property
    def first(self) -> float:
        """The curve's smallest memory limit, in units of 1F1B's peak memory.

        The default is smaller for plans that may recompute activations or copy activations to the host, because these
        plans need less memory.
        """
        keeps_everything = self.recomputation is Recompute.NONE and not self.dial
        return self.from_ or (0.5 if keeps_everything else 0.125)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dial:
            return
        self.refuse(("recompute", "offload"), "--dial, which plans both with and without it")
        if self.costs is None and self.time_d is None:
            raise ValueError("argument --dial needs --time-d, the time of a copy to the host, or --costs FILE")
