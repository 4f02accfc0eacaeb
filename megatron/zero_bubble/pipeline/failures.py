"""Errors in the user's layers, loss function or optimizer; each error names the layer or function that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from megatron.zero_bubble.runtime.recomputation_store import RecomputationStore
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule.errors import one_line

Recording = Callable[[int, int, str], AbstractContextManager[None]]
"""Makes a context manager that records an error; the arguments are (microbatch, chunk, description)."""


class Failure(NamedTuple):
    """An error in a step."""

    microbatch: int
    stage: int
    problem: str

    @classmethod
    def first_of(cls, failures: Iterable[Failure]) -> Failure | None:
        """Return the failure that the step raises: lowest microbatch, then lowest stage, then the earliest failure."""
        return min(failures, key=lambda failure: failure[:2], default=None)


class RecordingStore(WeightGradStore):
    """A `WeightGradStore` that records the error of a failed W, so that the rank finishes the step."""

    recording: Recording

    def pop(self, chunk: int, microbatch: int) -> None:
        with self.recording(microbatch, chunk, "W"):
            super().pop(chunk, microbatch)


class RecordingRecomputations(RecomputationStore):
    """A `RecomputationStore` that records the error of a failed R, so that the rank finishes the step."""

    recording: Recording

    def recompute(self, chunk: int, microbatch: int) -> None:
        with self.recording(microbatch, chunk, "recomputation"):
            super().recompute(chunk, microbatch)


@contextmanager
def failing_as(name: str) -> Iterator[None]:
    """Replace an error in the `with` block by a `ValueError` with the text "`name` failed" and the error's own text."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} failed: {type(error).__name__}: {one_line(error)}".rstrip()) from error
