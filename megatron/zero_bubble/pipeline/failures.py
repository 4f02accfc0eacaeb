"""Errors in the user's layers, loss function or optimizer; each error names the layer or function that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule.errors import one_line


class Failure(NamedTuple):
    """An error in a step. Failures are ordered by microbatch, then by stage; the step raises the first failure."""

    microbatch: int
    stage: int
    problem: str


class RecordingStore(WeightGradStore):
    """A `WeightGradStore` that records the error of a failed W, so that the rank finishes the step."""

    recording: Callable[[int, int, str], AbstractContextManager[None]]
    """Makes a context manager that records an error; the arguments are (microbatch, chunk, description)."""

    def pop(self, chunk: int, microbatch: int) -> None:
        with self.recording(microbatch, chunk, "W"):
            super().pop(chunk, microbatch)


@contextmanager
def failing_as(name: str) -> Iterator[None]:
    """Replace an error in the `with` block by a `ValueError` with the text "`name` failed" and the error's own text."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} failed: {type(error).__name__}: {one_line(error)}".rstrip()) from error
