"""From measured costs to the schedule that a running job goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch.distributed as dist

from megatron.zero_bubble.schedule import (
    Placement,
    Schedule,
    ScheduleError,
    StageCosts,
    Timeline,
    generate,
    simulate,
    validate,
)
from megatron.zero_bubble.schedule.formats import Profile, Setting, schedule_from_json, schedule_to_json
from megatron.zero_bubble.schedule.plan import Plan

ModelDescription = Mapping[str, Setting]

_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


@dataclass(frozen=True)
class MemoryLimit:
    """How much memory the activations of a rank may take: `--zero-bubble-memory-limit`.

    Exactly one of the three: `multiple` of 1F1B's peak, `num_bytes`, or, with neither, what is free on the device.
    """

    multiple: float | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> MemoryLimit:
        """`1.5` or `1.5x`, `40GiB`, or `auto`.

        Raises:
            ValueError: it is none of these.
        """
        word = text.strip().upper()
        if word == "AUTO":
            return cls()
        for unit, factor in _UNITS.items():
            if word.endswith(unit):
                return cls(num_bytes=int(_positive(word.removesuffix(unit), text) * factor))
        return cls(multiple=_positive(word.removesuffix("X"), text))

    def in_unit_costs(self, num_ranks: int, num_microbatches: int) -> float | None:
        """The limit in M_B, for a plan made before anything is measured; None if that cannot be said."""
        return None if self.multiple is None else self.multiple * min(num_ranks, num_microbatches)

    def in_bytes(self, placement: Placement, costs: StageCosts, num_microbatches: int, free_bytes: int | None) -> float:
        """The limit in the unit of measured costs.

        Args:
            free_bytes: what the device with the least has free for activations; needed for `auto` alone.
        """
        if self.multiple is not None:
            return self.multiple * one_f_one_b_peak(placement, costs, num_microbatches)
        if self.num_bytes is not None:
            return self.num_bytes
        assert free_bytes is not None
        return free_bytes

    @property
    def is_auto(self) -> bool:
        return self.multiple is None and self.num_bytes is None

    def of_ranks(self, limit: float, num_ranks: int, profile: Profile | None) -> tuple[float, ...]:
        """What the operations of every rank may leave behind, where `limit` is what `in_bytes` says.

        `auto` keeps room on each rank for what a single operation needs while it runs: logits, attention scores.
        """
        if not self.is_auto or profile is None:
            return (limit,) * num_ranks
        # Where there is no room nothing fits, which is told with the smallest limit that works.
        return tuple(max(1.0, limit - profile.inside_rank(rank)) for rank in range(num_ranks))


def _positive(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise ValueError(f"{text!r} is no memory limit: give a multiple of 1F1B's peak (1.5), bytes (40GiB) or auto")
    return value


def one_f_one_b_peak(placement: Placement, costs: StageCosts, num_microbatches: int) -> float:
    """1F1B's peak of the fullest rank: rank r holds min(m, p - r) microbatches of all of its chunks.

    With activation recomputation the oldest of them holds more in its backward than it did since its
    forward: what is recomputed lives until W.
    """
    peaks = []
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        held = min(num_microbatches, placement.num_ranks - rank) * sum(costs.memory_f[stage] for stage in stages)
        peaks.append(held + max(0, *(costs.memory_b[stage] for stage in stages)))
    return max(peaks)


@dataclass(frozen=True)
class BroadcastPlan:
    """A plan that only the job's first rank computes; the others are told, and validate what they get.

    `schedule` is a collective call of the whole job, the first time for each number of microbatches:
    tensor-parallel ranks must run the very same order.
    """

    plan: Plan
    _known: dict[int, Schedule] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def placement(self) -> Placement:
        return self.plan.placement

    def schedule(self, num_microbatches: int) -> Schedule:
        if num_microbatches in self._known:
            return self._known[num_microbatches]
        answer: list[str | ScheduleError] = [""]
        if dist.get_rank() == 0:
            try:
                answer = [schedule_to_json(self.plan.schedule(num_microbatches))]
            except ScheduleError as error:
                answer = [error]
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], ScheduleError):
            raise answer[0]
        schedule = schedule_from_json(answer[0])
        validate(schedule)
        self._known[num_microbatches] = schedule
        return schedule


@dataclass(frozen=True)
class Prediction:
    """What a schedule should do at measured costs."""

    profile: Profile
    schedule: Schedule

    @cached_property
    def _timeline(self) -> Timeline:
        return simulate(self.schedule, self.profile.costs)

    @property
    def bubble_rate(self) -> float:
        return self._timeline.bubble_rate

    @property
    def milliseconds(self) -> float:
        """From the first operation anywhere to the last."""
        return self._timeline.makespan

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Activations of each rank at their peak."""
        return self._timeline.peak_memory

    @cached_property
    def speed_up(self) -> float:
        """How many times as fast as 1F1B with the same work a rank: the ratio of the costs."""
        costs = self.profile.costs.whole_ranks(self.schedule.placement)
        baseline = simulate(generate("1f1b", self.schedule.num_ranks, self.schedule.num_microbatches), costs)
        return baseline.cost / self._timeline.cost
