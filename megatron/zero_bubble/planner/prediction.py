"""Predicts idle time, duration and memory of a schedule from measured costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron.zero_bubble.planner.generate import generate
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute, without_recomputation
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Idle, Timeline


@dataclass(frozen=True)
class MegatronsTime:
    """Time of a step under megatron-core's own schedule on Megatron's split, predicted when the layout was chosen.

    Attributes:
        milliseconds: the time.
        work: milliseconds of F, B and W of a microbatch on all ranks together, as the costs then were.
    """

    milliseconds: float
    work: float

    def with_costs(self, costs: StageCosts) -> float:
        """The time, scaled by the total work of the chosen layout with `costs` over its work when it was chosen."""
        return self.milliseconds * total_work(costs) / self.work


def total_work(costs: StageCosts) -> float:
    """Time of F, B and W of a microbatch in all stages, and of the vocabulary shards."""
    return sum(map(costs.work, range(costs.num_stages)))


class Gain(NamedTuple):
    """Predicted speed of a schedule relative to another schedule, and the name of the other schedule."""

    times: float
    over: str
    is_over_other_layout: bool = False
    """Whether the other one has Megatron's split, and this one has not."""

    def __str__(self) -> str:
        return f"{self.times:.3f} times as fast as {self.over}"


_KEEPS = {
    Recompute.NONE: "1F1B",
    Recompute.FULL: "1F1B, which recomputes in its backward",
    Recompute.PLANNED: "1F1B, which keeps everything",
}


@dataclass(frozen=True)
class Prediction:
    """Idle time, duration and memory of a schedule, simulated with the measured costs of a run."""

    profile: Profile
    schedule: Schedule
    recompute: Recompute = Recompute.NONE
    """How the run recomputes: 1F1B is compared as it would run then."""
    megatrons: MegatronsTime | None = None
    """Time on Megatron's split, where another layout was chosen in its place."""
    lengths: tuple[float, ...] = ()
    """Relative lengths of the microbatches, as in `simulate`."""

    @cached_property
    def timeline(self) -> Timeline:
        """The simulation of the schedule."""
        return simulate(self.schedule, self.profile.costs, lengths=self.lengths)

    @property
    def idle(self) -> Idle:
        return self.timeline.idle

    @property
    def milliseconds(self) -> float:
        """Predicted time from the first operation anywhere to the last."""
        return self.timeline.makespan

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Predicted peak memory of each rank's activations."""
        return self.timeline.peak_memory

    @cached_property
    def gain(self) -> Gain:
        """How many times as fast as megatron-core's 1F1B: on Megatron's split where a layout was chosen.

        Otherwise 1F1B has the same work a rank, and the ratio is that of the costs. Under full recomputation 1F1B
        recomputes every microbatch in its backward; otherwise it keeps everything. Where the vocabulary is spread over
        the ranks, 1F1B computes each rank's part of it in its backwards.
        """
        if self.megatrons is not None:
            milliseconds = self.megatrons.with_costs(self.profile.costs)
            return Gain(milliseconds / self.milliseconds, "1F1B on Megatron's split", is_over_other_layout=True)
        costs = self.profile.costs.whole_ranks(self.schedule.placement).with_vocabulary_in_weight_gradients()
        if self.recompute is Recompute.FULL:
            costs = costs.recomputing_in_backward()
        one_f_one_b = generate("1f1b", self.schedule.num_ranks, self.schedule.num_microbatches)
        baseline = simulate(one_f_one_b, costs, lengths=self.lengths)
        return Gain(baseline.cost / self.timeline.cost, _KEEPS[self.recompute])


def as_megatron_recomputes(timeline: Timeline) -> Timeline:
    """The simulation of the same order as megatron-core runs it: without R, because every backward recomputes."""
    if not timeline.schedule.recomputes:
        return timeline
    return simulate(without_recomputation(timeline.schedule), timeline.costs.recomputing_in_backward())


def memory_in_megatron(timeline: Timeline) -> tuple[float, ...]:
    """Rank -> peak memory of activations, if megatron-core runs the order: a backward restores one block at a time."""
    if not timeline.schedule.recomputes:
        return timeline.peak_memory
    costs = timeline.costs
    blocks = tuple(max(1, costs.blocks(stage)) for stage in range(costs.num_stages))
    return peak_memory(replace(timeline.schedule, groups=blocks), costs)
