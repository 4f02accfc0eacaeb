"""Counts the activations that one emulated rank holds, by the lifetimes of the objects that stand for them."""

from __future__ import annotations


class EmulatedMemory:
    """The memory of one rank: what is held now, and the most that was held since the last `reset`."""

    def __init__(self) -> None:
        self._now = self.peak = 0.0

    def reset(self) -> None:
        self.peak = self._now

    def hold(self, amount: float) -> Held:
        """Return an object that holds this much memory as long as it exists."""
        return Held(self, amount)

    def change(self, amount: float) -> None:
        self._now += amount
        self.peak = max(self.peak, self._now)


class Held:
    """Memory that is given back when nothing refers to this object any more."""

    def __init__(self, memory: EmulatedMemory, amount: float) -> None:
        self._memory, self.amount = memory, amount
        memory.change(amount)

    def __del__(self) -> None:
        self._memory.change(-self.amount)
