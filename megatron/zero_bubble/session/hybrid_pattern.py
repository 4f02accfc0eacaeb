"""Patterns of hybrid models: one symbol for each layer, `|` between stages, and `/` before multi-token prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_STAGE, _FURTHER = "|", "/"


@dataclass(frozen=True)
class HybridPattern:
    """A layer pattern of megatron-core's `HybridModel`.

    Attributes:
        stages: the symbols of every stage's layers, in model order; one entry if the pattern has no `|`.
        further: the part of the pattern from the first `/` on, for multi-token prediction; may be empty.
    """

    stages: tuple[str, ...]
    further: str = ""

    @classmethod
    def parse(cls, text: str) -> HybridPattern:
        main, further, rest = text.partition(_FURTHER)
        return cls(tuple(main.split(_STAGE)), further + rest)

    def __str__(self) -> str:
        return _STAGE.join(self.stages) + self.further

    @property
    def symbols(self) -> str:
        """The symbols of all layers except the layers of multi-token prediction."""
        return "".join(self.stages)

    @property
    def num_further(self) -> int:
        """The number of multi-token prediction layers: the number of nonempty parts that `/` separates in `further`."""
        return len([part for part in self.further.split(_FURTHER) if part])

    @property
    def is_divided(self) -> bool:
        """Whether the pattern divides the layers into stages."""
        return len(self.stages) > 1

    @property
    def partition(self) -> tuple[int, ...]:
        """The number of layers of each stage, in model order."""
        return tuple(map(len, self.stages))

    def divided(self, partition: Sequence[int]) -> HybridPattern:
        """A copy of the pattern, divided into stages so that stage i has `partition[i]` layers."""
        assert sum(partition) == len(self.symbols), "a partition of another number of layers"
        ends = accumulate(partition, initial=0)
        return HybridPattern(tuple(self.symbols[start:end] for start, end in pairwise(ends)), self.further)

    def whole(self) -> HybridPattern:
        """The pattern with all of its layers in one stage."""
        return self.divided([len(self.symbols)])


def undivided(pattern: str | None) -> str | None:
    """Return the text of a layer pattern without the marks between stages; None without a pattern."""
    return None if pattern is None else str(HybridPattern.parse(pattern).whole())
