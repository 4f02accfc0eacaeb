"""Costs of microbatches of different sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import SMALLEST, StageCosts


class MicrobatchSize(NamedTuple):
    """Size of a microbatch."""

    tokens: int
    """Tokens of all its sequences, with padding."""
    squares: int
    """Sum of the squared lengths of its sequences, to which the work of attention is proportional."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> MicrobatchSize:
        """The size of a microbatch of sequences of these lengths."""
        return cls(sum(lengths), sum(length * length for length in lengths))


class Curve(NamedTuple):
    """A cost as a function of the size of a microbatch: a constant, a part in proportion to its tokens,
    and one in proportion to their squared sequence lengths."""

    constant: float
    per_token: float
    per_square: float

    def at(self, size: MicrobatchSize) -> float:
        """The cost of a microbatch of this size."""
        return self.constant + self.per_token * size.tokens + self.per_square * size.squares


@dataclass(frozen=True)
class SizedCosts:
    """Costs of the operations of every stage, as functions of the size of a microbatch.

    Attributes:
        usual: costs of a usual microbatch; those without curves do not depend on the size.
        curves: by name, fields of `StageCosts` that do, each with the curve of every stage.
        inside: for every stage, the most memory that an operation needs while it runs; empty for none.
    """

    usual: StageCosts
    curves: Mapping[str, tuple[Curve, ...]]
    inside: tuple[Curve, ...] = ()

    def of(self, size: MicrobatchSize) -> StageCosts:
        """The costs of a microbatch of this size."""
        costs = {name: tuple(curve.at(size) for curve in curves) for name, curves in self.curves.items()}
        for name in ("time_f", "time_b", "time_w"):
            if name in costs:
                costs[name] = tuple(max(SMALLEST, time) for time in costs[name])
        return replace(self.usual, **costs)
