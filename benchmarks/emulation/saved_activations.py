"""Emulates the offload of activations to the host: real tensors are copied to the host and back at an emulated rate."""

from __future__ import annotations

import torch

from benchmarks.emulation.counted_memory import EmulatedMemory
from megatron.zero_bubble.runtime.copy_lane import ThreadLink
from megatron.zero_bubble.runtime.offload_store import OffloadStore
from megatron.zero_bubble.schedule import Schedule, StageCosts

_ELEMENTS = 2**16
"""Number of elements of the tensor that represents 1 M_B; the number is small to keep the allocation time short."""


class CountedOffloadStore(OffloadStore):
    """The offload store of a rank, with copies that take the times in the costs and with a count of the memory.

    Raises:
        ValueError: the times of copies in the costs do not correspond to a single rate.
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
    """A tensor that autograd saves in a forward, in place of the activations that can be copied to the host.

    Args:
        amount: size of the activations that can be copied, in M_B.
        value: value of each element of the tensor.
    """

    def __init__(self, amount: float, value: float) -> None:
        weight = torch.ones((), requires_grad=True)
        kept = torch.full((_elements(amount),), value, dtype=torch.float32)
        self._node = (kept * weight).grad_fn
        self._value = value

    def check(self) -> None:
        """Raise `AssertionError` if a backward would not find the values that the forward has saved."""
        assert self._node is not None
        found = self._node._saved_self  # type: ignore[attr-defined]  # of a product
        assert found[0] == found[-1] == self._value, "a copy brought back something else"


def _elements(amount: float) -> int:
    return max(1024, round(amount * _ELEMENTS))
