"""Holds the weight gradients (W) that B has put off."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

WeightGrad = Callable[[], None]
"""Computes the weight gradient of one layer for one microbatch and adds it to the parameter's gradient."""


class _Deferred(NamedTuple):
    """W of one layer for one microbatch."""

    parameter: Hashable
    start: Callable[[], None]
    run: WeightGrad


_Bundle = list[_Deferred]
"""W of one microbatch and chunk, in the order of B."""


class WeightGradStore:
    """Deferred weight gradients of one pipeline rank: one first-in-first-out queue per model chunk.

    While a B runs inside `deferring()`, each layer hands over its weight gradient with `put`; `flush`
    closes that microbatch's bundle and `pop` runs the oldest bundle of a chunk, `pop_by_parameter` several.
    Outside of `deferring()` a layer computes its weight gradient itself, fused with B.
    """

    def __init__(self, num_chunks: int = 1) -> None:
        self._queues: list[deque[tuple[int, _Bundle]]] = [deque() for _ in range(num_chunks)]
        self._bundle: _Bundle = []
        self._held: dict[int, int] = {}
        self._is_deferring = False
        self.num_flushed = 0
        """Number of bundles that have been closed or forgotten; tells the B of one microbatch from another's."""
        self.flushed_bytes = 0
        """Bytes that the W of the last flush holds, each storage counted once, as far as `put` was told."""

    @property
    def num_chunks(self) -> int:
        return len(self._queues)

    @property
    def is_deferring(self) -> bool:
        """Whether layers must hand over their weight gradients instead of computing them."""
        return self._is_deferring

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer weight gradients inside the `with` block, which is one B."""
        assert not self._is_deferring, "a B inside a B"
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def put(
        self,
        weight_grad: WeightGrad,
        held: Sequence[torch.Tensor] = (),
        parameter: Hashable = None,
        start: Callable[[], None] = lambda: None,
    ) -> None:
        """Defer one layer's weight gradient.

        Args:
            held: what it needs, which lives until it has run.
            parameter: what it adds to. W with the same one are never reordered among each other.
            start: begins in the background what it will wait for; called before the W that runs before it.
        """
        assert self._is_deferring, "put() outside of deferring()"
        self._bundle.append(_Deferred(parameter, start, weight_grad))
        for tensor in held:
            storage = tensor.untyped_storage()
            self._held[storage.data_ptr()] = storage.nbytes()

    def flush(self, chunk: int, microbatch: int) -> None:
        """Queue everything put since the last flush as the W of `microbatch`."""
        self._queues[chunk].append((microbatch, self._bundle))
        self.flushed_bytes = sum(self._held.values())
        self._start_bundle()

    def _start_bundle(self) -> None:
        self.num_flushed += 1
        self._bundle, self._held = [], {}

    def pop(self, chunk: int, microbatch: int) -> None:
        """Run the oldest W of `chunk`, which must be that of `microbatch`, and release what it held."""
        # In the order of B, from the last layer to the first, as autograd would have done it.
        _run([(microbatch, deferred) for deferred in self._take(chunk, microbatch)], lambda microbatch: None)

    def pop_by_parameter(self, chunk: int, microbatches: Sequence[int], before: Callable[[int], None]) -> None:
        """Run the oldest W of `chunk`, those of `microbatches`, parameter by parameter.

        Parameters come in the order of B, from the last layer to the first; the microbatches of each in theirs.
        `before` is told each time which microbatch is next.
        """
        _run(self._take_by_parameter(chunk, microbatches), before)

    def _take_by_parameter(self, chunk: int, microbatches: Sequence[int]) -> list[tuple[int, _Deferred]]:
        by_parameter: dict[Hashable, list[tuple[int, _Deferred]]] = {}
        for microbatch in microbatches:
            for deferred in self._take(chunk, microbatch):
                by_parameter.setdefault(deferred.parameter, []).append((microbatch, deferred))
        return [entry for of_one in by_parameter.values() for entry in of_one]

    def _take(self, chunk: int, microbatch: int) -> _Bundle:
        assert self._queues[chunk], f"W of microbatch {microbatch}, chunk {chunk}: nothing is pending"
        oldest, bundle = self._queues[chunk][0]
        assert oldest == microbatch, f"W of microbatch {microbatch}, chunk {chunk}: the oldest pending is {oldest}"
        self._queues[chunk].popleft()
        return bundle

    def pending(self) -> list[tuple[int, int]]:
        """Return (chunk, microbatch) of every W that has not run, oldest first within a chunk."""
        return [(chunk, microbatch) for chunk, bundles in enumerate(self._queues) for microbatch, _ in bundles]

    def clear(self) -> None:
        """Forget everything that is pending, without running it."""
        for bundles in self._queues:
            bundles.clear()
        self._start_bundle()


def _run(pending: list[tuple[int, _Deferred]], before: Callable[[int], None]) -> None:
    """Run weight gradients in order, each started one ahead, and release what each held."""
    pending.reverse()
    if pending:
        pending[-1][1].start()
    while pending:
        microbatch, deferred = pending.pop()
        if pending:
            pending[-1][1].start()
        before(microbatch)
        deferred.run()
