"""Hierarchical SGD: which groups of replicas average their parameters after which iteration.

Replicas step on their own gradients and average their parameters, small groups often and large ones seldom (Lin et al.
2020, Castiglia et al. 2020). A replica waits only for the others of its group, so a straggler delays few.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

_LEVEL = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class Level:
    """Groups of `group_size` replicas average after every `period` iterations."""

    period: int
    group_size: int


@dataclass(frozen=True)
class Hierarchy:
    """Levels from the smallest group to all replicas, and the synchronous iterations before the first local one.

    Raises:
        ValueError: the levels are not a hierarchy; the message says which levels would be.
    """

    levels: tuple[Level, ...]
    warmup: int = 0
    """Iterations from the start of a training that reduce gradients over all replicas."""

    def __post_init__(self) -> None:
        first = self.levels[0]
        if first.period < 1:
            raise ValueError(f"period {first.period} is not at least 1")
        if first.group_size < 2:
            raise ValueError(f"groups of {first.group_size} average nothing: use groups of at least 2 replicas")
        for inner, outer in pairwise(self.levels):
            if outer.period <= inner.period:
                raise ValueError(
                    f"period {outer.period} comes after {inner.period}: periods must increase with the groups"
                )
            if outer.group_size <= inner.group_size or outer.group_size % inner.group_size:
                raise ValueError(
                    f"groups of {outer.group_size} do not consist of whole groups of {inner.group_size}: each size "
                    "must be a multiple of the one before, and larger"
                )

    @classmethod
    def parse(cls, text: str, warmup: int = 0) -> Hierarchy:
        """Read `PERIOD:SIZE,PERIOD:SIZE,...`.

        Raises:
            ValueError: the text has another form, or its levels do not make a hierarchy.
        """
        matches = [_LEVEL.fullmatch(part) for part in text.split(",")]
        if not all(matches):
            raise ValueError("give PERIOD:SIZE,PERIOD:SIZE,..., as in 2:2,4:4,8:8")
        return cls(tuple(Level(int(match[1]), int(match[2])) for match in matches if match), warmup)

    @property
    def num_replicas(self) -> int:
        """The size of the last group, which holds all replicas."""
        return self.levels[-1].group_size

    def is_local(self, iteration: int) -> bool:
        """Whether replicas take the step of `iteration`, counted from 1, on their own gradients."""
        return iteration > self.warmup

    def group_size_after(self, iteration: int) -> int | None:
        """Size of the groups that average after `iteration`, the largest whose period divides it; None for none."""
        if not self.is_local(iteration):
            return None
        return next((level.group_size for level in reversed(self.levels) if iteration % level.period == 0), None)
