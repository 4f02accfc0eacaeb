"""Holds the blocks of layers whose activations F has dropped, until R runs their forward again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

Recomputation = Callable[[], None]
"""Runs the forward of one block of layers again, under autograd, and keeps the result for the block's backward."""


class ForwardMode(Enum):
    """What a block of layers does with its activations in a forward."""

    KEEP = "keep"
    """Keep them: the microbatch has no R."""
    DROP = "drop"
    """Drop all but its input and hand over its recomputation with `RecomputationStore.put`."""


class RecomputationStore:
    """Dropped blocks of one pipeline rank, by model chunk and microbatch.

    The executor says with `forward` whether the F that it runs drops its activations, and runs R with `recompute`.
    Outside of such an F, `mode` is None: a block does then what it does without a schedule of ours.
    """

    def __init__(self) -> None:
        self._dropped: dict[tuple[int, int], list[Recomputation]] = {}
        self._current: tuple[int, int] | None = None
        self.mode: ForwardMode | None = None

    @contextmanager
    def forward(self, chunk: int, microbatch: int, *, drops: bool) -> Iterator[None]:
        """Drop or keep the activations of the blocks that run inside the `with` block, which is one F."""
        assert self.mode is None, "an F inside an F"
        self.mode = ForwardMode.DROP if drops else ForwardMode.KEEP
        self._current = chunk, microbatch
        if drops:
            self._dropped[chunk, microbatch] = []
        try:
            yield
        finally:
            self.mode, self._current = None, None

    def put(self, recomputation: Recomputation) -> None:
        """Hand over the recomputation of one block; R runs them in the order of the forward."""
        assert self.mode is ForwardMode.DROP, "put() outside of an F that drops its activations"
        assert self._current is not None
        self._dropped[self._current].append(recomputation)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let blocks inside a block, which runs inside the `with` block, do what they do without a schedule of ours."""
        mode, self.mode = self.mode, None
        try:
            yield
        finally:
            self.mode = mode

    def recompute(self, chunk: int, microbatch: int) -> None:
        """Run the forwards of the blocks that the F of this microbatch has dropped."""
        for recomputation in self._dropped.pop((chunk, microbatch)):
            recomputation()

    def dropped(self) -> list[tuple[int, int]]:
        """Return (chunk, microbatch) of every F whose activations are dropped and not recomputed."""
        return list(self._dropped)

    def clear(self) -> None:
        """Forget everything that is dropped, without recomputing it."""
        self._dropped.clear()
