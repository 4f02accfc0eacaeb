"""Predicts idle time, duration and memory of a schedule from measured costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.generators import generate
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.recomputation import Recompute, without_recomputation
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Idle, Timeline


@dataclass(frozen=True)
class Prediction:
    """Idle time, duration and memory of a schedule, simulated with the measured costs of a run."""

    profile: Profile
    schedule: Schedule
    recompute: Recompute = Recompute.NONE
    """What the run recomputes, which 1F1B is compared by."""

    @cached_property
    def timeline(self) -> Timeline:
        """The simulation of the schedule."""
        return simulate(self.schedule, self.profile.costs)

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
    def speed_up(self) -> float:
        """How many times as fast as megatron-core's 1F1B with the same work a rank: the ratio of the costs.

        Under full recomputation 1F1B recomputes every microbatch in its backward; otherwise it keeps everything. Where
        the vocabulary is spread over the ranks, 1F1B computes each rank's part of it in its backwards.
        """
        costs = self.profile.costs.whole_ranks(self.schedule.placement).with_vocabulary_in_weight_gradients()
        if self.recompute is Recompute.FULL:
            costs = costs.recomputing_in_backward()
        baseline = simulate(generate("1f1b", self.schedule.num_ranks, self.schedule.num_microbatches), costs)
        return baseline.cost / self.timeline.cost


def as_megatron_recomputes(timeline: Timeline) -> Timeline:
    """The simulation of the same order as megatron-core runs it: without R, because every backward recomputes."""
    if not timeline.schedule.recomputes:
        return timeline
    return simulate(without_recomputation(timeline.schedule), timeline.costs.recomputing_in_backward())
