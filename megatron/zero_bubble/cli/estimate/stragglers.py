"""`zero-bubble estimate stragglers`: the cost of a straggler under synchronous, local and hierarchical SGD.

    zero-bubble estimate stragglers --num-replicas 8 --slowdown 5 --hierarchical-sgd 2:2,4:4,8:8
    zero-bubble estimate stragglers --straggler fixed --probability 0.1
    zero-bubble estimate stragglers --timeline steps.svg

In each step at most one replica straggles. With synchronous SGD, all replicas wait for the straggler in every step.
With hierarchical SGD, replicas average their parameters in the groups of --hierarchical-sgd. With local SGD, all
replicas average their parameters once in the longest period of --hierarchical-sgd, and do not wait for each other in
between. The table shows the mean time of a step, where a step without a straggler takes 1. The table does not show the
effect on convergence: the replicas' parameters differ more if they are averaged less often.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from megatron.zero_bubble.cli.estimate.replica_lanes import ReplicaStep, to_replica_lanes
from megatron.zero_bubble.cli.invocation import at_least, one_number, read_flags
from megatron.zero_bubble.cli.output import deliver, table
from megatron.zero_bubble.cli.shared_flags import CommandFlags, TableFlags, check_output
from megatron.zero_bubble.schedule.hierarchy import Hierarchy, Level
from megatron.zero_bubble.session.flag_parser import flag

_STEPS, _DRAWN_STEPS = 8192, 4
_MOST_REPLICAS = 4096
Times = Sequence[Sequence[float]]
"""Computation times of all replicas in each step; the time of a replica that does not straggle is 1."""


def simulate_replicas(times: Times, hierarchy: Hierarchy | None) -> list[list[ReplicaStep]]:
    """Simulate steps of replicas; return for each step the `ReplicaStep` of every replica.

    Args:
        hierarchy: the groups of replicas that average parameters after each step; None if all replicas reduce gradients
            in every step.
    """
    starts = [0.0] * len(times[0])
    steps = []
    for number, durations in enumerate(times, 1):
        ends = [start + duration for start, duration in zip(starts, durations, strict=True)]
        size = len(ends) if hierarchy is None else hierarchy.group_size_after(number) or 1
        last_ends = [max(ends[first : first + size]) for first in range(0, len(ends), size)]
        resumed = [last_ends[replica // size] for replica in range(len(ends))]
        slow = [duration > min(durations) for duration in durations]
        sizes = [size] * len(ends)
        steps.append(list(map(ReplicaStep, starts, ends, resumed, sizes, slow)))
        starts = resumed
    return steps


def time_per_step(times: Times, hierarchy: Hierarchy | None) -> float:
    """Return the mean time of a step: the time until all replicas end the last step, divided by the number of steps."""
    return max(step.resumed for step in simulate_replicas(times, hierarchy)[-1]) / len(times)


def _hierarchy(text: str) -> Hierarchy:
    try:
        return Hierarchy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


@dataclass(frozen=True)
class ReplicasFlags(CommandFlags):
    """replicas and stragglers"""

    num_replicas: int = flag("data-parallel replicas", 8, parse=at_least(2, _MOST_REPLICAS), metavar="R")
    straggler: str = flag(
        "random: another replica in each step; fixed: always replica 0", "random", choices=("random", "fixed")
    )
    slowdown: float = flag(
        "time of a straggler divided by the time of another replica", 5, parse=one_number(at_least=1), metavar="X"
    )
    probability: float = flag(
        "probability that a step has a straggler", 1, parse=one_number(at_least=0, at_most=1), metavar="P"
    )
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
    def methods(self) -> dict[str, Hierarchy | None]:
        """The groups of replicas that average parameters, by the name of the SGD variant; None for synchronous SGD."""
        local = Hierarchy((Level(self.hierarchical_sgd.levels[-1].period, self.num_replicas),))
        return {"synchronous": None, "local": local, "hierarchical": self.hierarchical_sgd}

    def draw_times(self, num_steps: int) -> list[list[float]]:
        """Return random times of all replicas in each step; the time of a replica that does not straggle is 1."""
        random = Random(self.seed)
        steps = []
        for _ in range(num_steps):
            # Both random numbers are drawn in every step, so that --probability does not change the slow replicas.
            replica, draw = random.randrange(self.num_replicas), random.random()
            times = [1.0] * self.num_replicas
            if draw < self.probability:
                times[replica if self.straggler == "random" else 0] = self.slowdown
            steps.append(times)
        return steps


@dataclass(frozen=True)
class StragglerFlags(ReplicasFlags, TableFlags):
    """output"""

    timeline: Path | None = flag("draw the first steps of synchronous and hierarchical SGD", metavar="FILE.svg")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeline is not None and self.timeline.suffix != ".svg":
            raise ValueError(f"argument --timeline: {self.timeline} must end in .svg")
        check_output(self.timeline, "--timeline")


def estimate_stragglers(argv: Sequence[str]) -> None:
    """Print the table of mean step times, and draw the timeline if --timeline is given."""
    flags = read_flags(StragglerFlags, argv, "zero-bubble estimate stragglers", __doc__ or "")
    times = flags.draw_times(_STEPS)
    means = {name: time_per_step(times, levels) for name, levels in flags.methods.items()}
    rows = [
        (name, _words(flags.methods[name]), f"{mean:.4g}", f"{means['synchronous'] / mean:.2f}")
        for name, mean in means.items()
    ]
    if flags.timeline is not None:
        deliver(_timeline(flags, times[:_DRAWN_STEPS]), flags.timeline)
    flags.deliver(means, table(("SGD", "levels", "mean step", "speedup"), rows, markdown=flags.markdown))


def _words(levels: Hierarchy | None) -> str:
    return "-" if levels is None else ",".join(f"{level.period}:{level.group_size}" for level in levels.levels)


def _timeline(flags: StragglerFlags, times: Times) -> str:
    often = "in each step" if flags.probability == 1 else f"with probability {flags.probability:g} in a step"
    title = f"{flags.num_replicas} replicas, one {flags.straggler} straggler {often}, {flags.slowdown:g} times as slow"
    methods = {"synchronous SGD": None, f"hierarchical SGD {_words(flags.hierarchical_sgd)}": flags.hierarchical_sgd}
    return to_replica_lanes({name: simulate_replicas(times, each) for name, each in methods.items()}, title=title)
