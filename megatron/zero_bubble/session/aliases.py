"""Translates flags of the original zero-bubble fork of Megatron-LM into this project's flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from megatron.zero_bubble.session.flag_parser import flag

_FORWARDS = " forwards"
_TIMERS = "--zero-bubble-pipeline-timers-start-iter, --zero-bubble-pipeline-timers-end-iter"
DEFAULT_WINDOW = (3, 6)
"""The first and the last iteration that a job profiles (measures) by default."""


@dataclass(frozen=True)
class AliasFlags:
    """Other names of zero bubble's flags."""

    enable_zero_bubble: bool = flag("the same as --zero-bubble", False)
    zero_bubble_v_schedule: bool = flag("the same as --zero-bubble-schedule zb-v", False)
    zero_bubble_v_schedule_mem_setup: str | None = flag(
        "with --zero-bubble-v-schedule: v-min, v-half or zb-v (default: zb)", choices=("min", "half", "zb")
    )
    zero_bubble_max_pending_backward: str | None = flag(
        "memory limit as forwards whose backward is pending: N, or auto"
    )
    zero_bubble_pipeline_timers_start_iter: int | None = flag("START of --zero-bubble-profile-iters")
    zero_bubble_pipeline_timers_end_iter: int | None = flag("END of --zero-bubble-profile-iters")
    enable_optimizer_post_validation: bool = flag("the same as --zero-bubble-post-validation", False)
    enable_exactly_numeric_match: bool = flag("accepted without effect: numerics always match", False)


T = TypeVar("T", bound=AliasFlags)


def translated(flags: T) -> T:
    """Return `flags` with every alias replaced by the zero-bubble flag that the alias stands for.

    Args:
        flags: an instance of a class that derives from `AliasFlags` and `ZeroBubbleFlags`.

    Raises:
        ValueError: an alias contradicts another flag.
    """
    ours: dict[str, Any] = {}
    given: Any = flags
    if flags.enable_zero_bubble:
        ours["zero_bubble"] = True
    if flags.enable_optimizer_post_validation:
        ours["zero_bubble_post_validation"] = True
    if schedule := _v_schedule(flags, given.zero_bubble_schedule):
        ours["zero_bubble_schedule"] = schedule
    if flags.zero_bubble_max_pending_backward is not None:
        if given.zero_bubble_memory_limit is not None:
            raise ValueError("give --zero-bubble-memory-limit or --zero-bubble-max-pending-backward, not both")
        ours["zero_bubble_memory_limit"] = flags.zero_bubble_max_pending_backward + _FORWARDS
    if given.zero_bubble_profile_iters is None and (window := _window(flags)) is not None:
        ours["zero_bubble_profile_iters"] = window
    return replace(flags, **asdict(AliasFlags()), **ours)


def _v_schedule(flags: AliasFlags, schedule: str | None) -> str | None:
    """The schedule that `--zero-bubble-v-schedule` stands for; None without `--zero-bubble-v-schedule`."""
    setup = flags.zero_bubble_v_schedule_mem_setup
    if not flags.zero_bubble_v_schedule:
        if setup is not None:
            raise ValueError(f"--zero-bubble-v-schedule-mem-setup {setup} needs --zero-bubble-v-schedule")
        return None
    stands_for = {"min": "v-min", "half": "v-half", "zb": "zb-v"}[setup or "zb"]
    if schedule not in (None, stands_for):
        raise ValueError(
            f"--zero-bubble-schedule {schedule} and --zero-bubble-v-schedule, which is {stands_for}: give one of them"
        )
    return stands_for


def _window(flags: AliasFlags) -> list[int] | None:
    start, end = flags.zero_bubble_pipeline_timers_start_iter, flags.zero_bubble_pipeline_timers_end_iter
    if start is None and end is None:
        return None
    first = DEFAULT_WINDOW[0] if start is None else start
    last = max(first, DEFAULT_WINDOW[1]) if end is None else end
    check_window(first, last, _TIMERS)
    return [first, last]


def check_window(first: int, last: int, flag: str) -> None:
    """Raise `ValueError` unless `first` to `last` is a range of iterations, or both are 0, which means no profile."""
    if not (1 <= first <= last or first == last == 0):
        raise ValueError(f"{flag} {first} {last}: give the first and the last iteration, counted from 1, or 0 0")


def pending_backwards(limit: str) -> str | None:
    """The value of `--zero-bubble-max-pending-backward` if this flag set the memory limit `limit`; otherwise None."""
    return limit.removesuffix(_FORWARDS) if limit.endswith(_FORWARDS) else None
