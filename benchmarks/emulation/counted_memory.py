"""Counts the activations of one emulated rank; a Python object represents each activation while it is in memory."""

from __future__ import annotations


class EmulatedMemory:
    """The memory of one rank: the current amount, and the largest amount since the last `reset`."""

    def __init__(self) -> None:
        self._now = self.peak = 0.0

    def reset(self) -> None:
        self.peak = self._now

    def hold(self, amount: float) -> Held:
        """Return an object that occupies this much memory until the object is deleted."""
        return Held(self, amount)

    def change(self, amount: float) -> None:
        self._now += amount
        self.peak = max(self.peak, self._now)


class Held:
    """An amount of memory that is released when nothing refers to this object any more."""

    def __init__(self, memory: EmulatedMemory, amount: float) -> None:
        self._memory, self.amount = memory, amount
        memory.change(amount)

    def __del__(self) -> None:
        self._memory.change(-self.amount)
