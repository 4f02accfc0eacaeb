"""Runs actions so that an error on one rank is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def jointly(action: Callable[[], T]) -> T:
    """Run `action` on every rank and return this rank's result; a collective call of all ranks.

    Raises:
        ValueError: or `OSError`, on every rank, if `action` raises it on any rank: the error of the first such rank. A
            rank that failed alone would leave the others waiting for it.
    """
    outcome, error = attempt(action)
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    raise_first(errors)
    return cast(T, outcome)


def on_rank(rank: int, action: Callable[[], T]) -> T:
    """Run `action` on `rank` alone, and return its result or raise its error on every rank; a collective call."""
    outcome: list[Any] = [attempt(action) if dist.get_rank() == rank else None]
    dist.broadcast_object_list(outcome, src=rank)
    value, error = outcome[0]
    raise_first([error])
    return value


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `action`, or the `ValueError` or `OSError` that it raises, for the other ranks to know."""
    try:
        return action(), None
    except (ValueError, OSError) as error:
        return None, error


def raise_first(errors: Iterable[Exception | None]) -> None:
    """Raise the first error of the ranks' errors, if there is one."""
    for error in errors:
        if error is not None:
            raise error
