"""Restores data iterators, random states and buffers, so that a step's forwards can run again with the same result."""

from __future__ import annotations

import random as python_random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.tensor_parallel import random
from megatron.core.utils import unwrap_model


def copied_rng_states() -> tuple[Any, Any, Any]:
    """Return arguments of megatron-core's `_set_all_rng_states` that restore the present random states.

    A tracker of random states for CUDA graphs gives its generators, which later draws change; they are copied.
    """
    cpu, cuda, tracker = random._get_all_rng_states()
    if random.is_graph_safe_cuda_rng_tracker(random.get_cuda_rng_tracker()):
        cuda, tracker = cuda.clone_state(), {name: state.clone_state() for name, state in tracker.items()}
    return cpu, cuda, tracker


class HostGenerators(NamedTuple):
    """The states of the random number generators of the CPU: torch's, Python's and NumPy's global generators."""

    torch: bytes
    python: Any
    numpy: tuple[bytes, int, int, float]

    @classmethod
    def now(cls) -> HostGenerators:
        state: Any = np.random.get_state()
        _, keys, *others = state
        return cls(torch.get_rng_state().numpy().tobytes(), python_random.getstate(), (keys.tobytes(), *others))

    def apply(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        python_random.setstate(self.python)
        keys, position, has_gauss, gauss = self.numpy
        np.random.set_state(("MT19937", np.frombuffer(keys, dtype=np.uint32), position, has_gauss, gauss))


class _Read(NamedTuple):
    """An item of a data iterator, and the states of the generators before and after the item was read."""

    item: Any
    before: HostGenerators
    after: HostGenerators


class RewindableIterator:
    """An iterator over `source` that can go back to its beginning once.

    Data may be random, for example masked at random. Reading an item again also repeats the item's effect on the CPU's
    random generators, if the generators have the states that they had before the first reading.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._kept: list[_Read] | None = []
        self._again: deque[_Read] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._again:
            item, before, after = self._again.popleft()
            if before == HostGenerators.now():
                after.apply()
            return item
        if self._kept is None:
            return next(self._source)
        before = HostGenerators.now()
        item = next(self._source)
        self._kept.append(_Read(item, before, HostGenerators.now()))
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
        self._random, self._host = copied_rng_states(), HostGenerators.now()
        modules = [module for chunk in model_chunks for module in unwrap_model(chunk).modules()]
        self._places = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
        # Several modules may have one buffer.
        buffers = {id(buffer): buffer for _, _, buffer in self._places if buffer is not None}
        self._copies = [(buffer, buffer.clone()) for buffer in buffers.values()]

    @torch.no_grad()
    def apply(self) -> None:
        """Restore the saved states.

        If buffers were not restored, a buffer that counts the tokens of an expert would count the tokens of a repeated
        forward twice.
        """
        random._set_all_rng_states(*self._random)
        self._host.apply()
        for buffer, before in self._copies:
            buffer.copy_(before)
        for module, name, buffer in self._places:
            module._buffers[name] = buffer  # A forward may put another tensor into the place of the buffer.
