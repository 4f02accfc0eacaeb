"""The flags of `python -m benchmarks.emulate`, many of which are also flags of `zero-bubble schedule`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.zero_bubble.cli.invocation import at_least, positive
from megatron.zero_bubble.cli.shared_flags import (
    LimitFlags,
    PostValidationFlags,
    ScheduleFlags,
    TableFlags,
    time_flag,
)
from megatron.zero_bubble.schedule.lower import RECEIVE_AHEAD
from megatron.zero_bubble.session.flag_parser import flag

ACTIVATION_BYTES = 65536
"""Default size in bytes of an emulated message between stages."""


@dataclass(frozen=True)
class EmulationFlags(ScheduleFlags, LimitFlags, PostValidationFlags, TableFlags):
    """the run"""

    schedule: list[str] | None = flag(
        "schedule to run; repeat for more (default: all but optimal)", None, action="append", metavar="NAME"
    )
    peers: bool = flag("run torch.distributed.pipelining's schedules as well", False)
    steps: int = flag("measured steps of each schedule", 5, parse=at_least(1), metavar="N")
    activation_bytes: int = flag(
        "size of a message between stages", ACTIVATION_BYTES, parse=at_least(16), metavar="BYTES"
    )
    receive_ahead: int = flag(
        "compute operations between posting a receive and using it", RECEIVE_AHEAD, parse=at_least(0), metavar="N"
    )
    data_parallel_size: int = flag("replicas of the pipeline", 1, parse=at_least(1), metavar="N")
    time_reduce: float | None = flag(
        "milliseconds that reducing a rank's gradients over the replicas takes", None, parse=positive, metavar="MS"
    )
    buckets: int = flag("number of buckets in which gradients are reduced", 10, parse=at_least(1), metavar="N")
    profile_output: Path | None = flag(
        "write the measured times of the only --schedule, for --costs FILE",
        None,
        parse=Path,
        metavar="FILE",
    )
    timeline: Path | None = flag(
        "folder for drawings of every schedule's median step beside its plan", None, parse=Path, metavar="DIR"
    )
    # These times are in milliseconds, with defaults long enough that the error of a sleep does not matter.
    time_f: tuple[float, ...] | None = time_flag("forward", "20 ms")
    time_b: tuple[float, ...] | None = time_flag("the gradient of the input", "20 ms")
    time_w: tuple[float, ...] | None = time_flag("the gradient of the weights", "20 ms")

    default_time: ClassVar[float] = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile_output is not None and len(self.schedule or ()) != 1:
            raise ValueError(
                "argument --profile-output: give exactly one --schedule, because a profile belongs to one placement"
            )
        if self.no_overlap_communication:
            raise ValueError("argument --no-overlap-communication: messages always overlap with compute here")
        if (self.data_parallel_size > 1) != (self.time_reduce is not None):
            raise ValueError(
                "argument --time-reduce: give it together with a --data-parallel-size of at least 2, or neither"
            )
        if self.time_reduce is not None:
            self.refuse(("profile_output", "timeline"), "--time-reduce, which needs replicas")
            self.refuse(("peers",), "--time-reduce: the gradients of peers are not reduced here")
        if self.post_validation:
            twice = "--post-validation, which runs our schedules twice"
            self.refuse(("peers", "time_reduce", "profile_output", "timeline"), twice)
