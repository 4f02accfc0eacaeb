"""The flags of `zero-bubble estimate stragglers`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron.zero_bubble.cli.estimate.stragglers import STRAGGLER_KINDS, StragglerKind, Stragglers
from megatron.zero_bubble.cli.invocation import at_least, one_number, positive
from megatron.zero_bubble.cli.shared_flags import CommandFlags, TableFlags
from megatron.zero_bubble.schedule.hierarchy import Hierarchy
from megatron.zero_bubble.session.flag_parser import flag

_not_negative = one_number(at_least=0)


def _probability(text: str) -> float:
    value = _not_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must not be above 1, got {text}")
    return value


def _hierarchy(text: str) -> Hierarchy:
    try:
        return Hierarchy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _periods(text: str) -> tuple[int, ...]:
    return tuple(at_least(1)(word) for word in text.split(","))


@dataclass(frozen=True)
class ReplicasFlags(CommandFlags):
    """replicas and stragglers"""

    num_replicas: int = flag("data-parallel replicas", 8, parse=at_least(2), metavar="R")
    straggler: StragglerKind = flag(
        "random: another replica in each step; fixed: always replica 0", "random", parse=str, choices=STRAGGLER_KINDS
    )
    slowdown: float = flag(
        "how many times as long as others a straggler takes", 5, parse=one_number(at_least=1), metavar="X"
    )
    probability: float = flag("probability that a step has a straggler", 1, parse=_probability, metavar="P")
    seed: int = flag("seed of the stragglers", 0, parse=at_least(0), metavar="N")
    hierarchical_sgd: Hierarchy = flag(
        "PERIOD:SIZE,...: the training's flag", "2:2,4:4,8:8", parse=_hierarchy, metavar="LEVELS"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.hierarchical_sgd.num_replicas
        if size != self.num_replicas:
            raise ValueError(
                f"argument --hierarchical-sgd: ends with groups of {size}, and --num-replicas is {self.num_replicas}: "
                "the last group must be all replicas"
            )

    @property
    def stragglers(self) -> Stragglers:
        return Stragglers(self.num_replicas, self.straggler, self.slowdown, self.probability, self.seed)


@dataclass(frozen=True)
class StragglerFlags(ReplicasFlags, TableFlags):
    """what is simulated"""

    time_step: float = flag("time of a step of a replica that does not straggle", 1, parse=positive, metavar="T")
    time_average: float = flag(
        "time of an averaging or reduction once its replicas are there", 0, parse=_not_negative, metavar="T"
    )
    steps: int = flag("steps to simulate", 8192, parse=at_least(1, 10**6), metavar="N")
    periods: tuple[int, ...] = flag(
        "numbers of steps between averagings of all replicas; those of the levels follow in proportion",
        "1,2,4,8,16,32,64",
        parse=_periods,
        metavar="N,N,...",
    )
    plot: Path | None = flag("draw the time of a step over the periods", None, parse=Path, metavar="FILE.svg")
    timeline: Path | None = flag(
        "draw the first steps of synchronous and hierarchical SGD", None, parse=Path, metavar="FILE.svg"
    )
    timeline_steps: int = flag("steps to draw", 4, parse=at_least(1, 64), metavar="N")
