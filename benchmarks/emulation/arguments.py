"""The flags of `python -m benchmarks.emulate`; it shares those of a schedule with `zero-bubble schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.zero_bubble.cli.flag_values import at_least, positive
from megatron.zero_bubble.cli.shared_flags import (
    LimitFlags,
    PostValidationFlags,
    ScheduleFlags,
    TableFlags,
    time_flag,
)
from megatron.zero_bubble.job.flag_parser import flag
from megatron.zero_bubble.schedule.lower import RECEIVE_AHEAD


@dataclass(frozen=True)
class EmulationFlags(ScheduleFlags, LimitFlags, PostValidationFlags, TableFlags):
    """the run"""

    schedule: list[str] | None = flag("repeat for more (default: all but optimal)", None, repeat=True, metavar="NAME")
    peers: bool = flag("run torch.distributed.pipelining's schedules as well", False)
    steps: int = flag("measured steps of each schedule", 5, parse=at_least(1), metavar="N")
    activation_bytes: int = flag("size of a message between stages", 65536, parse=at_least(16), metavar="BYTES")
    receive_ahead: int = flag(
        "compute operations between posting a receive and using it", RECEIVE_AHEAD, parse=at_least(0), metavar="N"
    )
    data_parallel_size: int = flag("replicas of the pipeline", 1, parse=at_least(1), metavar="N")
    time_reduce: float | None = flag(
        "reduce the gradients of a rank over the replicas, which takes so long", None, parse=positive, metavar="MS"
    )
    buckets: int = flag("buckets in which the gradients are reduced", 10, parse=at_least(1), metavar="N")
    profile_output: Path | None = flag(
        "write the measured times of the schedule, of which there must be one: --costs FILE reads them",
        None,
        parse=Path,
        metavar="FILE",
    )
    timeline: Path | None = flag(
        "draw the median step of every schedule there, beside the plan", None, parse=Path, metavar="DIR"
    )
    # These times are in milliseconds, with defaults long enough that the error of a sleep does not matter.
    time_f: tuple[float, ...] | None = time_flag("forward", "20 ms")
    time_b: tuple[float, ...] | None = time_flag("the gradient of the input", "20 ms")
    time_w: tuple[float, ...] | None = time_flag("the gradient of the weights", "20 ms")

    default_time: ClassVar[float] = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile_output is not None and len(self.schedule or ()) != 1:
            raise ValueError("argument --profile-output: give one --schedule, whose placement the profile is of")
        if self.no_overlap_communication:
            raise ValueError("argument --no-overlap-communication: messages always overlap with compute here")
        if (self.data_parallel_size > 1) != (self.time_reduce is not None):
            raise ValueError(
                "argument --time-reduce: it needs --data-parallel-size of at least 2, and replicas need it"
            )
        for name in ("profile_output", "timeline"):
            if getattr(self, name) is not None and self.time_reduce is not None:
                raise ValueError(f"argument --{name.replace('_', '-')}: of one pipeline: leave out --time-reduce")
        if self.peers and self.time_reduce is not None:
            raise ValueError("argument --peers: their gradients are not reduced here: leave out --time-reduce")
        for name in ("peers", "time_reduce", "profile_output", "timeline"):
            if self.post_validation and getattr(self, name):
                flag_name = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"argument {flag_name}: not with --post-validation, which compares our schedules with themselves"
                )
