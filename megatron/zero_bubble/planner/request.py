"""`PlanRequest`: all inputs of a plan, as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add

from megatron.zero_bubble.schedule.costs import LARGEST, StageCosts
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError, enough
from megatron.zero_bubble.schedule.ir import Placement, check_size
from megatron.zero_bubble.schedule.model_costs import ModelCosts, Partition
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.timeline import Timeline

EFFORT = 600_000
"""Default value of `PlanRequest.effort`; with this effort, a search takes one to two seconds."""
QUICK_EFFORT = 50_000
"""Effort of a quick estimate (see `PlanRequest.effort`)."""
DRAFT_EFFORT = 10_000
"""Largest effort of a draft plan; draft plans are compared by simulated times, other plans by expected times."""
MOST_CHUNKS = 64
"""Largest number of model chunks per rank."""

Limits = tuple[float, ...]
"""Rank -> memory limit of its activations."""


@dataclass(frozen=True)
class Layout:
    """A layout of a model: placement, partition, recomputation and vocabulary parallelism."""

    placement: Placement
    partition: Partition
    """Stage -> number of layers, in model order."""
    recompute: Recompute = Recompute.NONE
    vocabulary_parallel: bool = False
    """Whether the embedding and the output layer are spread over all ranks."""

    @property
    def combination(self) -> Layout:
        """The layout without its partition: placement, recomputation and vocabulary parallelism."""
        return replace(self, partition=())

    @property
    def complexity(self) -> tuple[int, int, int, int, int]:
        """Sort key that puts the simplest layout first.

        A layout without vocabulary shards, with few chunks and without recomputation is simple. A V-shaped placement
        makes a layout less simple, because megatron-core has no schedule for a V-shaped placement.
        """
        sizes, is_v = len(set(self.partition)), self.placement.kind == "v"
        recomputes = self.recompute is not Recompute.NONE
        return self.vocabulary_parallel, self.placement.num_chunks, recomputes, is_v, sizes


@dataclass(frozen=True)
class PlanRequest:
    """All inputs of a plan: the argument of `search_layouts`, `plan_layout` and `schedule_of`.

    Attributes:
        schedule: name of the schedule to plan (see `names`).
        num_microbatches: number of microbatches of an iteration.
        placements: placements to choose from, all for the same number of ranks.
        costs: `ModelCosts` of a model that the planner divides into stages, or `StageCosts` of the stages of a single
            placement; `default_costs` by default.
        partition: number of layers of every stage in model order; None to choose the partition.
        usual: the layout that is kept unless another layout is faster, for example Megatron's layout; None if no layout
            is preferred.
        recomputes: values of `Recompute` to choose from.
        vocabulary_parallel: whether the embedding and the output layer are spread over all ranks; None to choose.
        memory_limit: memory limit for the activations of a rank, in the unit of the costs: one value for all ranks, or
            one value for each rank; None for the default limit of the schedule.
        capacity: memory of a rank for parameters, gradients, optimizer states and activations, in the unit of the
            costs; None for no limit. A capacity needs `ModelCosts`, because `StageCosts` does not contain the memory of
            model states.
        usual_capacity: a larger capacity, for the layout `usual` only; None if `capacity` holds for all layouts.
        group_size: for interleaved placements, the number of microbatches that a rank runs in one chunk before it runs
            the same microbatches in the next chunk; None to choose the size. If a schedule is not planned from costs
            and `group_size` is None, a group has as many microbatches as there are ranks.
        overlap_communication: whether ranks compute while messages are in flight, as in `simulate`.
        post_validation: whether the optimizer step is validated in the next iteration, so that a rank starts the next
            iteration without waiting for the other ranks.
        takes_makespan: whether candidate schedules of a layout are compared by their makespan, and not by the longest
            span of a rank. Published bubble rates are computed from the longest span of a rank. If the optimizer step
            waits for all ranks, the time of an iteration is the makespan. Without post-validation, candidates for
            interleaved placements are always compared by their makespan. With post-validation, `takes_makespan` has no
            effect.
        pairs: whether a forward and a backward may run as one operation, so that one computes while the other exchanges
            tokens between experts (see `schedule.pairs`).
        offloads: whether activations may be copied to the host and back, under a memory limit (see `offloading`).
        host_rate: memory that the host link copies in a unit of time, with which `plan_layout` and `search_layouts`
            compute the times of copies; None if the costs contain these times.
        spread: half the interquartile range of an operation's duration, divided by the median. With a spread above
            zero, plans are compared by their expected times.
        time_between: time that passes between two successive operations of a rank. Only the expected time of a step
            includes the time between operations; the simulated time does not.
        effort: number of operations to plan for a placement, summed over all candidate schedules; a few candidates are
            planned even if the effort is zero. The local search takes at most the same effort again.
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

    def __post_init__(self) -> None:
        if not self.placements:
            raise ScheduleError("placements is empty: give at least one placement")
        if self.host_rate is not None and not self.host_rate > 0:
            raise ScheduleError(f"host_rate must be above zero, got {self.host_rate}")

    @property
    def num_ranks(self) -> int:
        return self.placements[0].num_ranks

    @property
    def placement(self) -> Placement:
        """The placement of a request with only one placement."""
        assert len(self.placements) == 1, "the layout has not been chosen"
        return self.placements[0]

    @property
    def recompute(self) -> Recompute:
        """The value of `Recompute` for a request with only one value in the field `recomputes`."""
        assert len(self.recomputes) == 1, "the layout has not been chosen"
        return self.recomputes[0]

    @property
    def model(self) -> ModelCosts:
        """The costs of the model's units."""
        assert isinstance(self.costs, ModelCosts)
        return self.costs

    @property
    def stage_costs(self) -> StageCosts:
        """The costs of the stages of the placement."""
        assert isinstance(self.costs, StageCosts)
        return self.costs

    def allows(self, layout: Layout) -> bool:
        """Whether the request allows the placement, partition and vocabulary parallelism of a layout."""
        return (
            layout.placement in self.placements
            and self.partition in (None, layout.partition)
            and self.vocabulary_parallel in (None, layout.vocabulary_parallel)
        )

    def capacity_of(self, layout: Layout) -> float | None:
        """Memory of a rank for parameters, gradients, optimizer states and activations; None for no limit."""
        is_usual = self.usual is not None and replace(layout, recompute=self.usual.recompute) == self.usual
        return self.usual_capacity if is_usual and self.usual_capacity is not None else self.capacity

    @property
    def is_judged_by_makespan(self) -> bool:
        """Whether candidate schedules are compared by their makespan."""
        return not self.post_validation and (self.takes_makespan or self.placement.kind == "interleaved")

    def time_of(self, timeline: Timeline) -> float:
        """The time of a step: with post-validation the longest span of a rank, otherwise the makespan."""
        return timeline.cost if self.post_validation else timeline.makespan

    @property
    def limits(self) -> Limits | None:
        """Rank -> memory limit of its activations; None for the default limit of the schedule."""
        return None if self.memory_limit is None else limits_of_ranks(self.memory_limit, self.num_ranks)

    def within(self, limits: Limits | None) -> PlanRequest:
        """The same request with the memory limits `limits`; None stands for the default limit of the schedule."""
        return replace(self, memory_limit=limits)

    def checked(self) -> PlanRequest:
        """Check a request with one placement, and fill in default costs and one memory limit per rank.

        Raises:
            ScheduleError: sizes, costs, limits or options of the request contradict each other.
        """
        name, placement, limits = self.schedule, self.placement, self.limits
        if placement.num_chunks > MOST_CHUNKS:
            raise ScheduleError(f"{placement.num_chunks} model chunks a rank are too many: at most {MOST_CHUNKS}")
        check_size(placement, self.num_microbatches)
        if self.group_size is not None and placement.kind != "interleaved":
            raise ScheduleError(f"schedule {name} has no microbatch groups, got a group size of {self.group_size}")
        if self.group_size is not None and self.group_size < 1:
            raise ScheduleError(f"schedule {name} needs microbatch groups of at least 1, got {self.group_size}")
        assert not isinstance(self.costs, ModelCosts), "the layout has not been chosen"
        assert self.vocabulary_parallel is not None, "the layout has not been chosen"
        costs = self.costs or default_costs(placement, self.recompute, vocabulary_parallel=self.vocabulary_parallel)
        if costs.num_stages != placement.num_stages:
            raise ScheduleError(
                f"schedule {name} on {self.num_ranks} ranks has {placement.num_stages} stages, "
                f"but the costs are for {costs.num_stages}"
            )
        if self.vocabulary_parallel and not costs.has_vocabulary:
            raise ScheduleError("vocabulary_parallel needs costs with the times of vocabulary shards, such as time_s")
        for limit in limits or ():
            if not limit > 0:
                raise ScheduleError(f"memory_limit must be above zero, got {limit}")
        others = {
            "vocabulary shards": costs.has_vocabulary,
            "recomputation": self.recompute is not Recompute.NONE,
            "offload": self.offloads,
        }
        for other, is_asked_for in others.items():
            if self.pairs and is_asked_for:
                raise ScheduleError(
                    f"schedule {name}: pairs of a forward and a backward do not work with {other}: leave out {other}, "
                    "or the times of token exchanges"
                )
        if self.recompute is Recompute.FULL and self.offloads:
            raise ScheduleError(
                f"schedule {name}: full recomputation leaves no activations to copy to the host: choose planned "
                "recomputation, or no offload"
            )
        if self.recompute is Recompute.NONE:
            costs = costs.keeping_everything()
        if limits is not None:
            limits = tuple(min(limit, LARGEST) for limit in limits)
        return replace(self, costs=costs, memory_limit=limits)


def with_room_for_shards(request: PlanRequest, limits: Limits) -> Limits:
    """With vocabulary shards, raise memory limits by the memory of one more microbatch, including its softmax."""
    costs = request.stage_costs
    if not costs.has_vocabulary:
        return limits
    added = map(add, request.placement.sums(costs.memory_f), request.placement.sums(costs.memory_s))
    return tuple(map(add, limits, added))


def limits_of_ranks(memory_limit: float | Sequence[float], num_ranks: int) -> Limits:
    """Rank -> memory limit, from one limit for all ranks or one limit for each rank.

    Raises:
        ScheduleError: the number of limits is not the number of ranks.
    """
    limits = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * num_ranks
    if len(limits) != num_ranks:
        raise ScheduleError(f"memory_limit has {len(limits)} entries, but there are {num_ranks} ranks")
    return limits


def are_within(amounts: Sequence[float], limits: Sequence[float]) -> bool:
    """Whether no amount exceeds its limit by more than a rounding error."""
    return all(amount - tolerance(amount) <= limit for amount, limit in zip(amounts, limits, strict=True))


def check_within(subject: Callable[[int], str], needed: Limits, limits: Sequence[float]) -> None:
    """Raise `Infeasible` for the first rank that needs more than its limit; the message begins with `subject(rank)`."""
    for rank, (amount, limit) in enumerate(zip(needed, limits, strict=True)):
        if not are_within([amount], [limit]):
            raise Infeasible(
                f"{subject(rank)} {amount:g} of memory, above the limit of {limit:g}; {enough(max(needed))} for "
                "every rank",
                max(needed),
                needed,
            )


def tolerance(amount: float) -> float:
    """The largest difference between two values near `amount` that counts as a rounding error."""
    return 1e-9 * abs(amount)
