"""Errors in the user's layers, loss function or optimizer; each error names the layer or function that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatron.zero_bubble.schedule.errors import one_line


class Failure(NamedTuple):
    """An error in a step. Failures are ordered by microbatch, then by stage; the step raises the first failure."""

    microbatch: int
    stage: int
    problem: str


@contextmanager
def failing_as(name: str) -> Iterator[None]:
    """Replace an error in the `with` block by a `ValueError` with the text "`name` failed" and the error's own text."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} failed: {type(error).__name__}: {one_line(error)}".rstrip()) from error
