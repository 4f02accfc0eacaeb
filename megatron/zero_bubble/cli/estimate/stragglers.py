"""Simulates stragglers: steps of replicas that wait for the other replicas of their group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from random import Random
from typing import Literal, get_args

from megatron.zero_bubble.schedule.hierarchy import Hierarchy, Level

StragglerKind = Literal["random", "fixed"]
STRAGGLER_KINDS: tuple[StragglerKind, ...] = get_args(StragglerKind)


@dataclass(frozen=True)
class Stragglers:
    """Replicas of which at most one straggles in a step."""

    num_replicas: int
    kind: StragglerKind = "random"
    """`random`: a randomly drawn replica straggles in each step. `fixed`: it is always replica 0."""
    slowdown: float = 5.0
    """How many times as long as the others a straggler takes."""
    probability: float = 1.0
    """Probability that a step has a straggler."""
    seed: int = 0

    def times(self, num_steps: int) -> list[list[float]]:
        """Draw the time of each replica in each step, where a replica that does not straggle takes 1."""
        random = Random(self.seed)
        steps = []
        for _ in range(num_steps):
            # Both are drawn in every step, so that the slow replicas do not depend on the probability.
            replica, draw = random.randrange(self.num_replicas), random.random()
            times = [1.0] * self.num_replicas
            if draw < self.probability:
                times[replica if self.kind == "random" else 0] = self.slowdown
            steps.append(times)
        return steps


@dataclass(frozen=True)
class ReplicaStep:
    """One step of one replica: it computes from `start` to `end`, then waits for its group until `resumed`."""

    start: float
    end: float
    resumed: float
    group_size: int
    """Replicas that wait for each other, in groups of neighbours; 1 for none."""


def simulate_replicas(
    times: Sequence[Sequence[float]], hierarchy: Hierarchy | None, time_average: float = 0.0
) -> list[list[ReplicaStep]]:
    """Simulate steps of replicas; return the step of every replica, for each step.

    Args:
        times: for each step the time that each replica computes.
        hierarchy: which groups average after which step; None if all replicas reduce gradients in every step.
        time_average: time of an averaging or reduction once its group is complete.
    """
    free = [0.0] * len(times[0])
    steps = []
    for number, durations in enumerate(times, 1):
        ends = [start + duration for start, duration in zip(free, durations, strict=True)]
        size = len(ends) if hierarchy is None else hierarchy.group_size_after(number) or 1
        resumed = ends
        if size > 1:
            resumed = []
            for first in range(0, len(ends), size):
                resumed += repeat(max(ends[first : first + size]) + time_average, size)
        steps.append([ReplicaStep(*each, size) for each in zip(free, ends, resumed, strict=True)])
        free = resumed
    return steps


def time_per_step(times: Sequence[Sequence[float]], hierarchy: Hierarchy | None, time_average: float = 0.0) -> float:
    """Return the mean time of a step, until the last replica has ended the last one."""
    last = simulate_replicas(times, hierarchy, time_average)[-1]
    return max(step.resumed for step in last) / len(times)


def scaled(hierarchy: Hierarchy, period: int) -> Hierarchy | None:
    """Return the levels with other periods, in the same proportions, so that all replicas average every `period` steps.

    None if a period would not be a whole number of at least 1.
    """
    last = hierarchy.levels[-1].period
    if any(level.period * period % last for level in hierarchy.levels):
        return None
    return Hierarchy(tuple(Level(level.period * period // last, level.group_size) for level in hierarchy.levels))
