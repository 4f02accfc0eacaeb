"""Restores data iterators, random states and buffers, so that a step's forwards can run again with the same result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.utils import unwrap_model


class RewindableIterator:
    """An iterator over `source` that can go back to its beginning once."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._kept: list[Any] | None = []
        self._again: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._again:
            return self._again.popleft()
        item = next(self._source)
        if self._kept is not None:
            self._kept.append(item)
        return item

    def rewind(self) -> None:
        """Go back to the first item. A second call of `rewind` is not allowed, because the iterator stops keeping items
        at the first call."""
        assert self._kept is not None
        self._again.extend(self._kept)
        self._kept = None

    def forget(self) -> None:
        """Drop the items that were kept for `rewind`; from then on, `rewind` must not be called."""
        self._kept = None


def make_rewindable(
    iterators: Sequence[Iterator[Any] | None],
) -> tuple[list[Iterator[Any] | None], list[RewindableIterator]]:
    """Wrap each iterator in a `RewindableIterator`; return each chunk's wrapper, and a list of the distinct wrappers.

    Chunks that share an iterator share its wrapper.
    """
    wrapped = {id(source): RewindableIterator(source) for source in iterators if source is not None}
    return [None if source is None else wrapped[id(source)] for source in iterators], list(wrapped.values())


class Restart:
    """Saves the random states and the modules' buffers on creation, and restores them in `apply`."""

    def __init__(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        self._random = random._get_all_rng_states()
        self._buffers = [(buffer, buffer.clone()) for chunk in model_chunks for buffer in unwrap_model(chunk).buffers()]

    @torch.no_grad()
    def apply(self) -> None:
        """Restore the saved states.

        If buffers were not restored, a buffer that counts the tokens of an expert would count the tokens of a repeated
        forward twice.
        """
        random._set_all_rng_states(*self._random)
        for buffer, before in self._buffers:
            buffer.copy_(before)
