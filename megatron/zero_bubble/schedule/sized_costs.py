"""Costs of microbatches of different sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.zero_bubble.schedule.costs import EXCHANGES, StageCosts

_SHORTEST = 1e-12
"""Shortest time of F, B and W, as a multiple of the time for a microbatch of the usual size. A fitted curve may give
zero, but times of `StageCosts` must be above zero."""


class MicrobatchSize(NamedTuple):
    """The size of a microbatch; the costs of the microbatch's operations depend on this size."""

    tokens: int
    """Number of tokens of all sequences, including padding."""
    squares: int
    """Sum of the squared lengths of the sequences; the work of attention is proportional to this sum."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> MicrobatchSize:
        """The size of a microbatch, from the lengths of its sequences."""
        return cls(sum(lengths), sum(length * length for length in lengths))


class Curve(NamedTuple):
    """A cost as a function of the size of a microbatch: constant + per_token * tokens + per_square * squares."""

    constant: float
    per_token: float
    per_square: float

    def at(self, size: MicrobatchSize) -> float:
        """The cost of a microbatch of the given size."""
        return self.constant + self.per_token * size.tokens + self.per_square * size.squares


@dataclass(frozen=True)
class SizedCosts:
    """Costs of the operations of every stage, as functions of the size of a microbatch.

    Attributes:
        usual: costs of a microbatch of the usual size. A cost without an entry in `curves` is the same for every size,
            with two exceptions: `saved_bw` is proportional to the time of B plus W, and the time of an exchange
            between experts is proportional to the time of the F or B that contains it.
        curves: name of a field of `StageCosts` -> for every stage, the cost as a function of the size of a microbatch.
        inside: stage -> largest temporary memory of an operation as a function of the size of a microbatch; empty if no
            memory was measured.
    """

    usual: StageCosts
    curves: Mapping[str, tuple[Curve, ...]]
    inside: tuple[Curve, ...] = ()

    def of(self, size: MicrobatchSize) -> StageCosts:
        """The costs of the operations of a microbatch of the given size."""
        costs = {name: tuple(curve.at(size) for curve in curves) for name, curves in self.curves.items()}
        for name in costs.keys() & {"time_f", "time_b", "time_w"}:
            shortest = (_SHORTEST * time for time in getattr(self.usual, name))
            costs[name] = tuple(map(max, costs[name], shortest))
        for part, whole in EXCHANGES.items():
            if whole in costs:
                stages = zip(getattr(self.usual, part), costs[whole], getattr(self.usual, whole), strict=True)
                costs[part] = tuple(min(time, exchanged / usual * time) for exchanged, time, usual in stages)
        return replace(self.usual, saved_bw=(), **costs).saving_as(self.usual)
