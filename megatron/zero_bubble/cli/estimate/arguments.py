"""The flags of `zero-bubble estimate`."""

from __future__ import annotations

import argparse
import contextlib
import re
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from megatron.zero_bubble.cli.invocation import FollowingFlags, at_least, one_number, positive
from megatron.zero_bubble.cli.shared_flags import CommandFlags, TableFlags, host_bandwidth_flag
from megatron.zero_bubble.planner.memory_limit import MemoryLimit
from megatron.zero_bubble.session.flag_parser import flag


def _bytes(text: str) -> float:
    limit = None
    with contextlib.suppress(ValueError):
        limit = MemoryLimit.parse(text).num_bytes
    if limit is None:
        raise argparse.ArgumentTypeError(f"expected bytes such as 80GiB, got {text!r}")
    return limit


def _bytes_or_zero(text: str) -> float:
    return 0.0 if re.fullmatch(r"0+(\.0+)?([KMG]?i?B)?", text.strip(), re.IGNORECASE) else _bytes(text)


def _number(help: str, default: float) -> Any:
    return flag(help, default, parse=positive, metavar="X")


@dataclass(frozen=True)
class ClusterFlags(CommandFlags):
    """the cluster"""

    world_size: int = flag("number of devices of the job", MISSING, parse=at_least(2), metavar="N")
    device_memory: float = flag("memory of one device", "80GiB", parse=_bytes, metavar="SIZE")
    reserved_memory: float = flag(
        "part of --device-memory that tensors cannot use: CUDA context, communication buffers, fragmentation",
        "3GiB",
        parse=_bytes_or_zero,
        metavar="SIZE",
    )
    device_tflops: float = _number("peak speed of one device in the training's precision, in TFLOP/s (A100: 312)", 312)
    mfu: float = flag(
        "fraction of the peak speed that layers reach; --profile has measured times",
        0.45,
        parse=one_number(above=0, at_most=1),
        metavar="X",
    )
    interconnect_bandwidth: float = _number(
        "speed of a message to another device, in GB/s (one 200 Gbit/s link: 25)", 25
    )
    expert_bandwidth: float | None = flag(
        "speed at which a device exchanges tokens with experts on other devices, in GB/s; exchanges then add to the "
        "time of layers (default: --interconnect-bandwidth with --overlap-moe-expert-parallel-comm; otherwise no time "
        "is added for exchanges, so --mfu has to allow for them)",
        parse=positive,
        metavar="X",
    )
    host_bandwidth: float | None = host_bandwidth_flag("--zero-bubble-offload auto among the training's flags")
    interconnect_latency: float = flag(
        "time of an empty message, in microseconds", 20, parse=one_number(at_least=0), metavar="X"
    )

    @property
    def flops(self) -> float:
        """Speed of the layers on one device, in floating-point operations per second."""
        return self.device_tflops * 1e12 * self.mfu

    def message_ms(self, num_bytes: float, bandwidth: float | None = None) -> float:
        """Return the milliseconds that a message to another device takes; `bandwidth` is in GB/s."""
        seconds = num_bytes / ((bandwidth or self.interconnect_bandwidth) * 1e9)
        return 1e3 * (self.interconnect_latency * 1e-6 + seconds)


@dataclass(frozen=True)
class EstimateFlags(ClusterFlags, TableFlags, FollowingFlags):
    """the estimate"""

    zero_stage: int | None = flag(
        "ZeRO stage: 1 shards the optimizer's states over data-parallel ranks, 2 also gradients, 3 also parameters "
        "(default: the stage of --use-torch-fsdp2 or --use-distributed-optimizer)",
        parse=at_least(0, 3),
        metavar="{0,1,2,3}",
    )
    schedule: list[str] | None = flag(
        "schedule to estimate; may be repeated (default: all but optimal)", action="append", metavar="NAME"
    )
    profile: Path | None = flag("measured costs, which --zero-bubble-profile-output wrote in a run with these flags")
    per_rank: bool = flag("print a line for every pipeline rank of every schedule", False)
