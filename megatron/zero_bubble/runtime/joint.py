"""Runs actions so that an error on one rank is raised on all ranks, and makes plans on one rank for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.process_group import new_store
from megatron.zero_bubble.schedule import validate
from megatron.zero_bubble.schedule.formats import schedule_from_json, schedule_to_json

T = TypeVar("T")

_IS_ALONE: ContextVar[bool] = ContextVar("is_alone", default=False)
"""Whether this rank runs an action that no other rank runs, so that a collective call would wait forever."""


def jointly(action: Callable[[], T], patience: float | None = None) -> T:
    """Run `action` on every rank and return this rank's result; a collective call of all ranks.

    Args:
        patience: seconds that a rank on which `action` has failed waits for the end of `action` on all other ranks; no
            limit by default. Give a limit if `action` contains collectives, in which other ranks may wait for the
            failed rank forever.

    Raises:
        ValueError: `action` raised a `ValueError` or an `OSError` on some rank. Every rank raises the failed rank's
            error, so that no rank waits for the failed rank. If `action` fails on several ranks, every rank raises the
            error of the lowest failed rank. After `patience` seconds, the failed rank raises the cause of its error,
            which ends the job.
    """
    outcome, error = attempt(action)
    if patience is not None:
        store = new_store("megatron.zero_bubble/joint", dist.get_rank())
        store.set(str(dist.get_rank()), "")
        if error is not None:
            try:
                store.wait([str(rank) for rank in range(dist.get_world_size())], timedelta(seconds=patience))
            except RuntimeError:  # at least one rank has not ended `action`
                raise error.__cause__ or error from None
    raise_first(from_all_ranks(error), error)
    return cast(T, outcome)


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return `value` of every rank of `group` (by default of the job), in the order of ranks; a collective call."""
    assert not _IS_ALONE.get(), "a collective call in an action of `on_rank`, in which other ranks take no part"
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_rank(rank: int, action: Callable[[], T]) -> T:
    """Run `action`, which contains no collective call, on rank `rank`; all ranks return its result or raise its error.

    `on_rank` is a collective call.
    """
    assert not _IS_ALONE.get(), "a collective call in an action of `on_rank`, in which other ranks take no part"
    outcome: list[Any] = [None]
    if dist.get_rank() == rank:
        token = _IS_ALONE.set(True)
        try:
            outcome = [attempt(action)]
        finally:
            _IS_ALONE.reset(token)
    dist.broadcast_object_list(outcome, src=rank)
    value, error = outcome[0]
    raise_first([error], error)
    return value


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result of `action`, None), or (None, the `ValueError` or `OSError` that `action` raised)."""
    try:
        return action(), None
    except (ValueError, OSError) as error:
        return None, error


def raise_first(errors: Iterable[Exception | None], own_error: Exception | None) -> None:
    """Raise the first error in `errors`, if any.

    The raised error gets the cause of `own_error`, this rank's error, because an error loses its cause when the error
    is sent between ranks.
    """
    for error in errors:
        if error is not None:
            raise error from (own_error and own_error.__cause__)


def plan_on_first_rank(plan: RunSchedules, num_microbatches: int) -> RunSchedules:
    """Return a copy of `plan` with a schedule for `num_microbatches` that the job's first rank makes for all ranks.

    `plan_on_first_rank` is a collective call of the whole job. One rank plans for all ranks, because a solver with a
    time limit may find a different schedule on each rank, and all ranks must run the same schedule.

    Raises:
        ScheduleError: the first rank found no schedule; raised on all ranks.
    """
    schedule = schedule_from_json(on_rank(0, lambda: schedule_to_json(plan.schedule(num_microbatches))))
    validate(schedule)
    return plan.with_shared(schedule)
