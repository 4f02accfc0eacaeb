"""Predicts idle time, duration and peak memory of a schedule from measured costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron.zero_bubble.planner.generate import generate
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.ir import Schedule
from megatron.zero_bubble.schedule.lower import lower
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import Recompute, without_recomputation
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Idle, Timeline


@dataclass(frozen=True)
class MegatronsTime:
    """Time of a step under megatron-core's own schedule: predicted for Megatron's split of the layers when the layout
    was chosen, or measured in the layout of the run.

    Attributes:
        milliseconds: predicted or measured time of the step.
        work: milliseconds of F, B and W of one microbatch, summed over all ranks, in the predicted or measured step.
            The sum omits operations on vocabulary shards, because Megatron's split has no shards, and because
            operations on shards contain waits for other ranks.
        is_same_layout: whether the time was measured in the layout of the run.
    """

    milliseconds: float
    work: float
    is_same_layout: bool = False

    def with_costs(self, costs: StageCosts) -> float:
        """The time of the step for new costs, assumed to be proportional to the time of F, B and W."""
        return self.milliseconds * work_of_stages(costs) / self.work


def work_of_stages(costs: StageCosts) -> float:
    """Time of F, B and W of one microbatch, summed over all stages."""
    return sum(map(sum, (costs.time_f, costs.time_b, costs.time_w)))


class Gain(NamedTuple):
    """Predicted speedup of a schedule over a baseline schedule."""

    times: float
    """Time of the baseline schedule divided by the time of the predicted schedule."""
    over: str
    """Name of the baseline schedule."""
    is_over_other_layout: bool = False
    """Whether the baseline schedule is for Megatron's split, and the predicted schedule for another layout."""

    def __str__(self) -> str:
        return f"{self.times:.3f} times as fast as {self.over}"


_KEEPS = {
    Recompute.NONE: "1F1B",
    Recompute.FULL: "1F1B that recomputes in its backward",
    Recompute.PLANNED: "1F1B that keeps everything",
}


@dataclass(frozen=True)
class Prediction:
    """Idle time, duration and peak memory of a schedule, simulated with the measured costs of a run."""

    profile: Profile
    schedule: Schedule
    recompute: Recompute = Recompute.NONE
    """Which microbatches of the run have an R. The baseline, 1F1B, recomputes only with `Recompute.FULL`."""
    megatrons: MegatronsTime | None = None
    """Time of a step of megatron-core's own schedule; None to predict the time from the costs of the run's layout."""
    lengths: tuple[float, ...] = ()
    """Relative lengths of the microbatches, as in `simulate`."""
    interlocks: bool = False
    """Whether a rank begins the next iteration while other ranks are still in this iteration (post-validation)."""
    baseline_costs: StageCosts | None = None
    """The costs from which 1F1B is simulated; None for the costs of `profile`, which may contain waiting times that
    were measured in the order of `schedule`."""

    @cached_property
    def timeline(self) -> Timeline:
        """The simulation of the schedule."""
        return simulate(self.schedule, self.profile.costs, lengths=self.lengths)

    @property
    def idle(self) -> Idle:
        return self.timeline.idle

    @property
    def milliseconds(self) -> float:
        """Predicted makespan: milliseconds from the first operation on any rank to the end of the last operation."""
        return self.timeline.makespan

    @property
    def time(self) -> float:
        """Predicted time of an iteration: the longest span of a rank if iterations interlock, else the makespan."""
        return self.timeline.cost if self.interlocks else self.milliseconds

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Rank -> predicted peak memory of activations, in bytes."""
        return self.timeline.peak_memory

    @cached_property
    def gain(self) -> Gain:
        """Predicted speedup over megatron-core's 1F1B.

        If `megatrons` is given, the speedup is `megatrons.milliseconds`, scaled to the measured costs, divided by
        `time`. The scale factor is the time of F, B and W in the measured costs divided by `megatrons.work`. Without
        `megatrons`, the speedup is the makespan of 1F1B divided by `time`; each rank has the same layers in both
        schedules. Under full recomputation 1F1B recomputes every microbatch in its backward; otherwise 1F1B keeps all
        activations. In 1F1B the time of the operations on vocabulary shards is part of the backwards.
        """
        if self.megatrons is not None:
            times, is_same = self.megatrons.with_costs(self.profile.costs), self.megatrons.is_same_layout
            over = _KEEPS[self.recompute] if is_same else "1F1B on Megatron's split"
            return Gain(times / self.time, over, is_over_other_layout=not is_same)
        baseline = of_1f1b(self.timeline, self.schedule.num_microbatches, self.recompute, self.baseline_costs)
        return Gain(baseline.makespan / self.time, _KEEPS[self.recompute])


def of_1f1b(
    timeline: Timeline, num_microbatches: int, recompute: Recompute, costs: StageCosts | None = None
) -> Timeline:
    """Simulate 1F1B with the layers of each rank in a timeline, from `costs` or from the timeline's costs.

    See `Prediction.gain`.
    """
    costs = (costs or timeline.costs).whole_ranks(timeline.schedule.placement).with_vocabulary_in_weight_gradients()
    if recompute is Recompute.FULL:
        costs = costs.recomputing_in_backward()
    one_f_one_b = generate("1f1b", timeline.schedule.num_ranks, num_microbatches)
    return simulate(
        lower(one_f_one_b) if timeline.hardware_queues else one_f_one_b,
        costs,
        overlap_communication=timeline.overlap_communication,
        hardware_queues=timeline.hardware_queues,
        lengths=timeline.lengths,
    )


def as_megatron_recomputes(timeline: Timeline) -> Timeline:
    """Simulate the schedule as megatron-core runs it: without R, and with a recomputation in every backward."""
    return recomputed_in_backward(timeline.schedule, timeline) if timeline.schedule.recomputes else timeline


def recomputed_in_backward(schedule: Schedule, timeline: Timeline) -> Timeline:
    """Simulate a schedule without R, and with a recomputation in every backward."""
    schedule = without_recomputation(schedule)
    return simulate(
        lower(schedule) if timeline.hardware_queues else schedule,
        timeline.costs.recomputing_in_backward(),
        overlap_communication=timeline.overlap_communication,
        hardware_queues=timeline.hardware_queues,
        lengths=timeline.lengths,
    )


def memory_in_megatron(timeline: Timeline) -> tuple[float, ...]:
    """Rank -> peak memory of activations if megatron-core runs the schedule and recomputes one block at a time."""
    if not timeline.schedule.recomputes:
        return timeline.peak_memory
    costs = timeline.costs
    blocks = tuple(max(1, costs.blocks(stage)) for stage in range(costs.num_stages))
    return peak_memory(replace(timeline.schedule, groups=blocks), costs)
