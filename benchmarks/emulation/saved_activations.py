"""Emulates activations that a schedule copies to the host and back: real tensors and copies, at an emulated rate."""

from __future__ import annotations

import torch

from benchmarks.emulation.counted_memory import EmulatedMemory
from megatron.zero_bubble.runtime.copy_lane import ThreadLink
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.schedule import Schedule, StageCosts

_ELEMENTS = 2**16
"""Elements of the tensor that stands for an M_B: few, because a rank that computes does not wait for its allocation."""


class CountedOffloadStore(OffloadStore):
    """The store of a rank whose copies take the times of its costs, and whose memory is counted.

    Raises:
        ValueError: the costs are not those of one rate.
    """

    def __init__(self, costs: StageCosts, schedule: Schedule, rank: int, memory: EmulatedMemory) -> None:
        stages = schedule.placement.stages_of(rank)
        self._sizes = [costs.memory_d[stage] for stage in stages]
        times = [(costs.time_d[stage], costs.time_h[stage]) for stage in stages]
        sizes = [4 * _elements(size) for size in self._sizes]  # in bytes
        rates = {1e3 * size / time for size, both in zip(sizes, times, strict=True) for time in both if time}
        if rates and max(rates) > 1.01 * min(rates):
            raise ValueError("an emulated host link copies at one rate: give the same --time-h as --time-d, or none")
        super().__init__(ThreadLink(min(rates, default=None)))
        self._memory = memory

    def release(self, chunk: int, microbatch: int) -> None:
        super().release(chunk, microbatch)
        assert self.device_bytes(chunk, microbatch) == 0, "the tensor is still on the device"
        self._memory.change(-self._sizes[chunk])

    def bring_back(self, chunk: int, microbatch: int) -> None:
        self._memory.change(self._sizes[chunk])
        super().bring_back(chunk, microbatch)


class SavedActivation:
    """A tensor that autograd saves in a forward, for the part of its activations that can be copied.

    Args:
        amount: that part, in M_B.
        value: of its elements.
    """

    def __init__(self, amount: float, value: float) -> None:
        weight = torch.ones((), requires_grad=True)
        kept = torch.full((_elements(amount),), value, dtype=torch.float32)
        self._node = (kept * weight).grad_fn
        self._value = value

    def check(self) -> None:
        """Raise `AssertionError` unless a backward would find the tensor as the forward has saved it."""
        assert self._node is not None
        found = self._node._saved_self  # type: ignore[attr-defined]  # of a product
        assert found[0] == found[-1] == self._value, "a copy brought back something else"


def _elements(amount: float) -> int:
    return max(1024, round(amount * _ELEMENTS))
