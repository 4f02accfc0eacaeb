"""Running forwards again as if for the first time: their data, their random state, what they leave behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.utils import unwrap_model


class RewindableIterator:
    """Hands on what `source` yields, and can yield it again."""

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
        """Go back to the beginning, for the only time: from here on nothing is kept."""
        assert self._kept is not None
        self._again.extend(self._kept)
        self._kept = None

    def forget(self) -> None:
        """There will be no going back."""
        self._kept = None


def make_rewindable(
    iterators: Sequence[Iterator[Any] | None],
) -> tuple[list[Iterator[Any] | None], list[RewindableIterator]]:
    """The iterators, rewindable, and these once each: chunks that share an iterator share it still."""
    wrapped = {id(source): RewindableIterator(source) for source in iterators if source is not None}
    return [None if source is None else wrapped[id(source)] for source in iterators], list(wrapped.values())


class Restart:
    """The state at the start of a step's forwards: all random generators and the modules' buffers."""

    def __init__(self, model_chunks: Sequence[torch.nn.Module]) -> None:
        self._random = random._get_all_rng_states()
        self._buffers = [(buffer, buffer.clone()) for chunk in model_chunks for buffer in unwrap_model(chunk).buffers()]

    @torch.no_grad()
    def apply(self) -> None:
        """Go back to it. What a forward counts in a buffer (tokens of an expert) is not counted twice."""
        random._set_all_rng_states(*self._random)
        for buffer, before in self._buffers:
            buffer.copy_(before)
