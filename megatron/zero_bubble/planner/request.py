"""`PlanRequest`: everything that a plan of a pipeline depends on, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

from megatron.zero_bubble.schedule.costs import LARGEST, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.ir import Placement, check_size
from megatron.zero_bubble.schedule.model_costs import ModelCosts, Partition
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.timeline import Timeline

EFFORT = 300_000
"""Operations that the candidates of one plan have together, by default: a second or so."""
QUICK_EFFORT = 50_000
"""The same where the plan is an estimate that is wanted soon."""
MOST_CHUNKS = 64
"""Most model chunks a rank."""

Limits = tuple[float, ...]
"""Rank -> memory limit of its activations."""


@dataclass(frozen=True)
class Layout:
    """Where the layers of a model are, and which microbatches are recomputed.

    `vocabulary_parallel` says whether embedding and output layer are spread over all ranks.
    """

    placement: Placement
    partition: Partition
    recompute: Recompute = Recompute.NONE
    vocabulary_parallel: bool = False

    @property
    def combination(self) -> Layout:
        """The layout without its partition: its placement, recomputation and place of the vocabulary."""
        return replace(self, partition=())

    @property
    def complexity(self) -> tuple[int, int, int, int, int]:
        """Key by which simpler layouts come first: vocabulary shards, chunks a rank, recomputation, a V, stage sizes.

        megatron-core's own schedule runs on a linear or an interleaved layout, too, and not on a V.
        """
        sizes, is_v = len(set(self.partition)), self.placement.kind == "v"
        recomputes = self.recompute is not Recompute.NONE
        return self.vocabulary_parallel, self.placement.num_chunks, recomputes, is_v, sizes


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a plan depends on. `search_layouts`, `plan_layout` and `schedule_of` take one.

    Attributes:
        schedule: name of the schedule that is planned (see `names`).
        num_microbatches: microbatches of an iteration.
        placements: placements to choose from, all of the same number of ranks.
        costs: costs of a model's units, whose layers are then divided into stages; or costs of the stages of the only
            placement. By default `default_costs`.
        partition: layers of every stage in model order, if they are fixed.
        usual: the layout that stays unless another one is faster, such as Megatron's; None if there is none.
        recomputes: the ways to recompute activations to choose from.
        vocabulary_parallel: whether embedding and output layer are spread over all ranks; None for the faster way.
        memory_limit: memory of a rank for activations, for all ranks or one a rank, in the unit of the costs; None for
            the schedule's own limit.
        capacity: memory of a rank for parameters, gradients, optimizer states and activations, in the unit of the
            costs; None for no limit. Only costs of units have states.
        usual_capacity: the same for the usual layout, where that may take more; None where it may not.
        group_size: microbatches that pass through a chunk before the next chunk's turn, in interleaved placements; None
            for a planner's choice, or the number of ranks in schedules without costs.
        overlap_communication: whether ranks compute while their messages are on the way, as in `simulate`.
        post_validation: whether the optimizer's step is validated in the next iteration, so that iterations interlock.
        takes_makespan: whether a plan is judged by its makespan, which an iteration takes if the optimizer's step waits
            for all ranks, and not by the longest span of a rank, as published bubble rates are. Without post-validation
            interleaved placements always are.
        pairs: whether a forward and a backward may run as one, so that each computes while the other exchanges tokens
            between experts (see `schedule.pairs`).
        offloads: whether activations may be copied to the host and back, under a memory limit (see `offloading`).
        host_rate: memory that a host link copies in a time unit, where costs of a model's units say nothing of copies.
        spread: half the interquartile range of a duration over its median. If it is above zero, the plan with the
            shortest expected time is chosen, and not the one with the shortest time at the costs.
        time_between: time between two operations of a rank, which only an expected time has.
        effort: operations that a planner plans in all candidates of one placement; a few candidates are planned anyway.
    """

    schedule: str
    num_microbatches: int
    placements: tuple[Placement, ...]
    costs: StageCosts | ModelCosts | None = None
    partition: Partition | None = None
    usual: Layout | None = None
    recomputes: tuple[Recompute, ...] = (Recompute.NONE,)
    vocabulary_parallel: bool | None = False
    memory_limit: float | Sequence[float] | None = None
    capacity: float | None = None
    usual_capacity: float | None = None
    group_size: int | None = None
    overlap_communication: bool = True
    post_validation: bool = False
    takes_makespan: bool = False
    pairs: bool = False
    offloads: bool = False
    host_rate: float | None = None
    spread: float = 0.0
    time_between: float = 0.0
    effort: int = EFFORT

    @property
    def num_ranks(self) -> int:
        return self.placements[0].num_ranks

    @property
    def placement(self) -> Placement:
        """The only placement."""
        assert len(self.placements) == 1, "a layout is still to be chosen"
        return self.placements[0]

    @property
    def recompute(self) -> Recompute:
        """The only way to recompute."""
        assert len(self.recomputes) == 1, "a layout is still to be chosen"
        return self.recomputes[0]

    @property
    def model(self) -> ModelCosts:
        """The costs of the model's units."""
        assert isinstance(self.costs, ModelCosts)
        return self.costs

    @property
    def stage_costs(self) -> StageCosts:
        """The costs of the stages of the only placement."""
        assert isinstance(self.costs, StageCosts)
        return self.costs

    def allows(self, layout: Layout) -> bool:
        """Whether the layout has a placement, a partition and a place of the vocabulary to choose from."""
        return (
            layout.placement in self.placements
            and self.partition in (None, layout.partition)
            and self.vocabulary_parallel in (None, layout.vocabulary_parallel)
        )

    def capacity_of(self, layout: Layout) -> float | None:
        """Memory of a rank for states and activations in this layout; None for no limit."""
        is_usual = self.usual is not None and replace(layout, recompute=self.usual.recompute) == self.usual
        return self.usual_capacity if is_usual and self.usual_capacity is not None else self.capacity

    @property
    def is_judged_by_makespan(self) -> bool:
        """Whether a plan is as good as its makespan is short."""
        return not self.post_validation and (self.takes_makespan or self.placement.kind == "interleaved")

    def time_of(self, timeline: Timeline) -> float:
        """The time of a step: the longest span of a rank if iterations interlock, else the makespan."""
        return timeline.cost if self.post_validation else timeline.makespan

    @property
    def limits(self) -> Limits | None:
        """Memory limit of the activations of every rank; None for the schedule's own."""
        given = self.memory_limit
        if given is None:
            return None
        return tuple(given) if isinstance(given, Sequence) else (given,) * self.num_ranks

    def within(self, limits: Limits | None) -> PlanRequest:
        """The same request with these memory limits of the ranks; None for the schedule's own."""
        return replace(self, memory_limit=limits)

    def checked(self) -> PlanRequest:
        """The request of one placement with its costs and one limit a rank.

        Raises:
            ScheduleError: sizes, costs or limits do not fit together.
        """
        name, placement, limits = self.schedule, self.placement, self.limits
        if placement.num_chunks > MOST_CHUNKS:
            raise ScheduleError(f"{placement.num_chunks} model chunks a rank are too many: at most {MOST_CHUNKS}")
        check_size(placement, self.num_microbatches)
        if self.group_size is not None and placement.kind != "interleaved":
            raise ScheduleError(f"schedule {name} has no microbatch groups, got a group size of {self.group_size}")
        assert not isinstance(self.costs, ModelCosts), "a layout is still to be chosen"
        assert self.vocabulary_parallel is not None, "a layout is still to be chosen"
        costs = self.costs or default_costs(placement, self.recompute, vocabulary_parallel=self.vocabulary_parallel)
        if costs.num_stages != placement.num_stages:
            raise ScheduleError(
                f"schedule {name} on {self.num_ranks} ranks has {placement.num_stages} stages, "
                f"but the costs are for {costs.num_stages}"
            )
        if limits is not None and len(limits) != self.num_ranks:
            raise ScheduleError(f"memory_limit has {len(limits)} entries, but there are {self.num_ranks} ranks")
        for limit in limits or ():
            if not limit > 0:
                raise ScheduleError(f"memory_limit must be above zero, got {limit}")
        if self.pairs and (self.recompute is not Recompute.NONE or costs.has_vocabulary):
            what = "vocabulary shards" if costs.has_vocabulary else "recomputation"
            raise ScheduleError(f"schedule {name}: pairs of a forward and a backward do not work with {what}")
        if self.pairs and self.offloads:
            raise ScheduleError(f"schedule {name}: pairs of a forward and a backward do not work with offload")
        if self.recompute is Recompute.FULL and self.offloads:
            raise ScheduleError(
                f"schedule {name}: nothing that is recomputed is copied to the host: ask for planned recomputation in "
                "place of full, or for no offload"
            )
        if self.recompute is Recompute.NONE:
            costs = costs.keeping_everything()
        if limits is not None:
            limits = tuple(min(limit, LARGEST) for limit in limits)
        return replace(self, costs=costs, memory_limit=limits)


def with_room_for_shards(request: PlanRequest, limits: Limits) -> Limits:
    """Raise limits by the memory that vocabulary shards add: one more microbatch in flight, and its softmax."""
    costs = request.stage_costs
    if not costs.has_vocabulary:
        return limits
    added = map(add, request.placement.sums(costs.memory_f), request.placement.sums(costs.memory_s))
    return tuple(map(add, limits, added))
