"""Runs actions so that an error on one rank is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def jointly(action: Callable[[], T]) -> T:
    """Run `action` on every rank and return this rank's result; a collective call of all ranks.

    Raises:
        ValueError: or `OSError`, on every rank, if `action` raises it on any rank: the error of the first such rank. A
            rank that failed alone would leave the others waiting for it.
    """
    outcome, error = _try(action)
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for error in errors:
        if error is not None:
            raise error
    return outcome  # type: ignore[return-value]


def on_rank(rank: int, action: Callable[[], T]) -> T:
    """Run `action` on `rank` alone, and return its result or raise its error on every rank; a collective call."""
    outcome: list[Any] = [_try(action) if dist.get_rank() == rank else None]
    dist.broadcast_object_list(outcome, src=rank)
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _try(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except (ValueError, OSError) as error:
        return None, error
