"""Watches for a hung pipeline, reports the operation of each of the pipeline's ranks, and ends the job."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.zero_bubble.runtime.watchdog import RankState, Stall, Watchdog
from megatron.zero_bubble.session.environment import host_name
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.reports import flush_output, print_error

if TYPE_CHECKING:
    from megatron.zero_bubble.mcore.schedule_runner import ForwardBackward

_SHARE = 0.9
"""Default timeout of the watchdog as a share of the collectives' timeout, so that the watchdog reports a hang first."""


def stall_timeout(flags: JobFlags) -> float:
    """Seconds that a rank may spend in one operation before the pipeline counts as hung; 0 for no limit."""
    given: float | None = flags.zero_bubble_timeout
    return _SHARE * 60.0 * flags.distributed_timeout_minutes if given is None else given


def check_stall_timeout(flags: JobFlags) -> None:
    """Raise `ValueError` unless the watchdog's timeout is at least 0, finite and below the timeout of collectives."""
    timeout, collectives = stall_timeout(flags), 60.0 * flags.distributed_timeout_minutes
    if not 0 <= timeout < math.inf:
        raise ValueError(f"--zero-bubble-timeout must be at least 0, got {timeout}")
    if timeout >= collectives:
        raise ValueError(
            f"--zero-bubble-timeout {timeout:g} must be below --distributed-timeout-minutes "
            f"{flags.distributed_timeout_minutes} ({collectives:g} s), when messages and collectives give up themselves"
        )


def open_watchdog(flags: JobFlags, forward_backward: ForwardBackward, program: str) -> Watchdog | None:
    """Start and return this rank's watchdog; None if the flags turn it off. `open_watchdog` is a collective call."""
    timeout = stall_timeout(flags)
    if timeout == 0:
        return None
    return Watchdog(
        store=dist.distributed_c10d._get_default_store(),
        rank=flags.rank,
        world_size=flags.world_size,
        position=forward_backward.position,
        timeout=timeout,
        report=lambda stall: print_error(program, describe(stall)),
        leave=_leave,
        host=host_name(os.environ),
    )


def _leave() -> None:
    """End the process at once and without an exception, because a hung main thread may never handle an exception."""
    flush_output()
    os._exit(1)


def describe(stall: Stall) -> str:
    """Describe a hung pipeline in several lines: each rank's position in its schedule, and the likely causes."""
    lines = [
        f"the pipeline hangs: rank {stall.raised_by} has been at one operation for {stall.timeout:g} s "
        f"(--zero-bubble-timeout). Schedule {stall.schedule}; the operation of each rank is in brackets:"
    ]
    for rank, state in enumerate(stall.states):
        if state is None:
            lines.append(f"    rank {rank} does not answer: its process or its host has stopped or died")
            continue
        lines.append(f"    rank {rank} on {state.host}, process {state.pid}, for {state.seconds:.1f} s: {state.where}")
        lines.append(f"        {'; '.join(filter(None, (state.excerpt, state.line and f'in {state.line}')))}")
    lines.append(f"    look first at: {_suspects(stall)}")
    return "\n".join(lines)


def _suspects(stall: Stall) -> str:
    """Name likely causes of a hang: ranks that do not answer, else ranks that wait for no message, else the network."""
    silent = [f"rank {rank}, which does not answer" for rank, state in enumerate(stall.states) if state is None]
    answers: list[RankState] = [state for state in stall.states if state is not None]
    computing = sorted((state for state in answers if state.is_computing), key=lambda state: -state.seconds)
    outside = [state for state in answers if not state.excerpt]
    suspects = silent or [f"rank {s.rank} on {s.host}, which {s.where}" for s in (*computing, *outside)]
    return "; ".join(suspects) or "the network, because all ranks wait for messages"
