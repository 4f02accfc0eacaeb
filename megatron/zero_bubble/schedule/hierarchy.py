"""Hierarchical SGD: groups of replicas, and the iterations after which a group averages its parameters.

Each replica takes optimizer steps on its own gradients. Small groups of replicas average their parameters often, and
large groups seldom (Lin et al. 2020, Castiglia et al. 2020). A slow replica delays only the replicas of its group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

_LEVEL = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class Level:
    """Groups of `group_size` replicas average their parameters after every `period` iterations."""

    period: int
    group_size: int


@dataclass(frozen=True)
class Hierarchy:
    """The levels of hierarchical SGD, from the smallest groups to the group of all replicas.

    Raises:
        ValueError: the levels do not form a hierarchy.
    """

    levels: tuple[Level, ...]
    warmup: int = 0
    """Number of iterations, at the start of training, in which gradients are reduced over all replicas."""

    def __post_init__(self) -> None:
        first = self.levels[0]
        if first.period < 1:
            raise ValueError(f"period {first.period} is too short: use at least 1 iteration")
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
                    "must be a multiple of the previous size, and larger"
                )

    @classmethod
    def parse(cls, text: str, warmup: int = 0) -> Hierarchy:
        """Read the levels of hierarchical SGD from text in the form `PERIOD:SIZE,PERIOD:SIZE,...`.

        Raises:
            ValueError: the text does not have the form `PERIOD:SIZE,...`, or its levels do not form a hierarchy.
        """
        matches = [_LEVEL.fullmatch(part) for part in text.split(",")]
        if not all(matches):
            raise ValueError("give PERIOD:SIZE,PERIOD:SIZE,..., as in 2:2,4:4,8:8")
        return cls(tuple(Level(int(match[1]), int(match[2])) for match in matches if match), warmup)

    @property
    def num_replicas(self) -> int:
        """The number of replicas, which is the group size of the last level."""
        return self.levels[-1].group_size

    def is_local(self, iteration: int) -> bool:
        """Whether each replica takes the optimizer step of `iteration` (from 1) on its own gradients."""
        return iteration > self.warmup

    def group_size_after(self, iteration: int) -> int | None:
        """Size of the largest groups of replicas that average their parameters after `iteration`.

        Iterations are numbered from 1. `group_size_after` returns None if no group averages its parameters after
        `iteration`.
        """
        if not self.is_local(iteration):
            return None
        return next((level.group_size for level in reversed(self.levels) if iteration % level.period == 0), None)
