"""Errors of the user's layers, losses and optimizers, with the name of the part that has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatron.zero_bubble.schedule.errors import one_line


class Failure(NamedTuple):
    """A failed forward. Failures are ordered by microbatch, then by stage; the first failure causes the others."""

    microbatch: int
    stage: int
    problem: str


@contextmanager
def failing_as(name: str) -> Iterator[None]:
    """Replace an error of the `with` block by a `ValueError` that says that the part `name` has failed."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} failed: {type(error).__name__}: {one_line(error)}".rstrip()) from error
