"""The planning problem of one placement, as tuples for the inner loops of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from math import ceil
from operator import add, sub

from megatron.zero_bubble.planner.bounds import lower_bound
from megatron.zero_bubble.planner.codes import Codes
from megatron.zero_bubble.planner.footprint import Footprint
from megatron.zero_bubble.planner.request import DRAFT_EFFORT, EFFORT, Limits, PlanRequest, are_within, check_within
from megatron.zero_bubble.schedule.block_groups import in_groups
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.graph import collective_time
from megatron.zero_bubble.schedule.ir import Placement, Schedule
from megatron.zero_bubble.schedule.kinds import VOCABULARY
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.shard_ops import shortest_delay
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Timeline

LONG = 30_000
"""A problem with more operations than `LONG` is long: few candidates are tried, without a local search."""
CLOSE = 5e-4
"""The search in a long problem (see `LONG`) ends at a plan within this relative distance from the lower bound."""


@dataclass(frozen=True)
class Problem:
    """A planning problem: to order the operations of every rank so that the longest span, or the makespan, is short."""

    placement: Placement
    num_microbatches: int
    costs: StageCosts
    """Costs of the stages."""
    limits: tuple[float, ...]
    """Rank -> memory limit of its activations, in the unit of the costs."""
    overlap_communication: bool = True
    """Whether ranks compute while messages are in flight, as in `simulate`."""
    recompute: Recompute = Recompute.NONE
    """Which microbatches have an R (recomputation)."""
    takes_makespan: bool = False
    """Whether plans are compared by their makespan, and not by the longest span of a rank. The time of an iteration is
    the makespan if the next iteration starts only after all ranks have finished."""
    budget: int = EFFORT
    """Largest number of operations that all candidate orders may have together; a few orders are tried in any case.
    The local search takes at most the same effort again."""
    spread: float = 0.0
    """Half the interquartile range of an operation's duration, divided by the median, as in `PlanRequest`."""
    time_between: float = 0.0
    """Additional time between two successive operations of a rank, as in `PlanRequest`."""
    group_size: int | None = None
    """Number of microbatches that pass through a chunk before the next chunk's turn, as megatron-core orders forwards;
    None to plan the order of forwards."""

    @classmethod
    def of(cls, request: PlanRequest, limits: Limits) -> Problem:
        """The problem of a checked request, with memory limits for the activations of every rank."""
        return cls(
            request.placement,
            request.num_microbatches,
            request.stage_costs,
            limits,
            request.overlap_communication,
            request.recompute,
            takes_makespan=request.is_judged_by_makespan,
            budget=request.effort,
            spread=request.spread if request.effort > DRAFT_EFFORT else 0.0,
            time_between=request.time_between if request.effort > DRAFT_EFFORT else 0.0,
            group_size=request.group_size,
        )

    @classmethod
    def solved_by(
        cls, schedule: Schedule, costs: StageCosts, *, overlap_communication: bool, takes_makespan: bool
    ) -> Problem:
        """A problem in which the given schedule can be simulated with the given costs."""
        return cls(
            schedule.placement,
            schedule.num_microbatches,
            in_groups(costs, schedule.groups),
            (0.0,) * schedule.num_ranks,
            overlap_communication,
            takes_makespan=takes_makespan,
        )

    def simulated(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule with the costs of the problem."""
        return simulate(schedule, self.costs, overlap_communication=self.overlap_communication)

    @property
    def is_feasible(self) -> bool:
        """Whether a schedule with separate B and W fits in the memory limits."""
        return are_within(self.smallest_limits, self.limits)

    def check_feasible(self) -> None:
        """Raise `Infeasible` if no schedule with separate B and W fits in the memory limits."""
        check_within(lambda rank: f"rank {rank} needs at least", self.smallest_limits, self.limits)

    @property
    def is_long(self) -> bool:
        """Whether the problem has so many operations that few candidates are tried (see `LONG`)."""
        return self.num_ops > LONG

    @property
    def aim(self) -> float:
        """Cost of a plan at which the search for a better plan ends."""
        return self.bound * (1 + (CLOSE if self.is_long else 1e-9))

    def judged(self, span: float, makespan: float) -> tuple[float, float]:
        """The time by which plans are compared, and the time that decides between equally fast plans."""
        return (makespan, span) if self.takes_makespan else (span, makespan)

    def judged_spans(self, starts: Sequence[float], ends: Sequence[float]) -> tuple[float, float]:
        """The result of `judged` for ranks whose spans start at the times `starts` and end at the times `ends`."""
        return self.judged(max(map(sub, ends, starts)), max(ends) - self.first_start(starts))

    def first_start(self, starts: Sequence[float]) -> float:
        """The time from which the makespan is measured; `starts` contains the start of every rank's span."""
        return 0.0 if self.has_shards else min(starts)

    @property
    def varies(self) -> bool:
        """Whether durations vary, so that plans are compared by their expected times."""
        return self.spread > 0 or self.time_between > 0

    def keeping_everything(self) -> Problem:
        """The same problem without R: every F keeps its activations."""
        return replace(self, costs=self.costs.keeping_everything(), recompute=Recompute.NONE)

    def recomputing_in_backward(self) -> Problem:
        """The same problem without R: every B recomputes the activations that its F drops."""
        return replace(self, costs=self.costs.recomputing_in_backward(), recompute=Recompute.NONE)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_ops(self) -> int:
        """The number of operations, without recomputations (R)."""
        num_on_shards = 4 * self.num_ranks + 1 if self.has_shards else 0
        return (3 * self.num_stages + num_on_shards) * self.num_microbatches

    @cached_property
    def has_shards(self) -> bool:
        """Whether the embedding and the output layer are spread over all ranks as vocabulary shards."""
        return self.costs.has_vocabulary

    @cached_property
    def codes(self) -> Codes:
        return Codes.of(self.num_stages)

    @cached_property
    def delay(self) -> float:
        """Least time between F and B of the last stage: `shortest_delay` with vocabulary shards, 0 without them."""
        return shortest_delay(self.costs) if self.has_shards else 0.0

    @cached_property
    def num_delayed(self) -> int:
        """Number of microbatches that are additionally in flight while the last stage waits for softmax and loss."""
        return ceil(self.delay / (max(self.work) / self.num_microbatches) - 1e-9)

    @property
    def recomputes(self) -> bool:
        """Whether any microbatch may be recomputed (R)."""
        return self.recompute is not Recompute.NONE

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Stage -> rank that has the stage."""
        return tuple(self.placement.rank_of(stage) for stage in range(self.num_stages))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Code of an operation -> rank that runs the operation."""
        ranks = list(self.rank_of) * (self.codes.end // self.num_stages)
        ranks[self.codes.loss] = self.rank_of[-1]
        return tuple(ranks)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Rank -> its stages in model order."""
        return tuple(map(self.placement.stages_of, range(self.num_ranks)))

    @cached_property
    def _messages(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Two tuples for messages between stages s and s + 1: latencies, and times for which messages occupy a rank."""
        times = self.costs.messages(self.placement)
        nothing = (0,) * len(times)
        return (times, nothing) if self.overlap_communication else (nothing, times)

    @property
    def message(self) -> tuple[float, ...]:
        """Stage s -> latency of a message between stages s and s + 1; 0 without overlap of communication."""
        return self._messages[0]

    @cached_property
    def links(self) -> tuple[tuple[int, int, float], ...]:
        """Dependencies between the operations of one microbatch (see `Codes.links`)."""
        collective = collective_time(self.costs) if self.has_shards else None
        return tuple(self.codes.links(self.placement, self.message, collective))

    @cached_property
    def users(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Code of an operation -> tuples (code of an operation that needs the result, latency of the result)."""
        users: list[list[tuple[int, float]]] = [[] for _ in range(self.codes.end)]
        for source, target, latency in self.links:
            users[source].append((target, latency))
        return tuple(map(tuple, users))

    @cached_property
    def receiving(self) -> tuple[float, ...]:
        """Code of an operation -> time for which receiving its input occupies the rank, right before the operation."""
        edges = self._messages[1]
        return self.codes.costs(f=(0, *edges), drop=(0, *edges), b=(*edges, 0))

    @cached_property
    def sending(self) -> tuple[float, ...]:
        """Code of an operation -> time for which sending its result occupies the rank, right after the operation."""
        edges = self._messages[1]
        return self.codes.costs(f=(*edges, 0), drop=(*edges, 0), b=(0, *edges))

    @cached_property
    def latency(self) -> tuple[float, ...]:
        """Code of an operation -> compute time, plus the time for which receiving the input occupies the rank."""
        times = self.costs.times
        compute = chain.from_iterable(times[kind] for kind in self.codes.kinds)
        return tuple(map(add, self.receiving, compute))

    @cached_property
    def duration(self) -> tuple[float, ...]:
        """Code of an operation -> time for which the operation occupies its rank."""
        return tuple(map(add, self.latency, self.sending))

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        """Stage -> memory of a microbatch on the stage."""
        return tuple(Footprint.of(self.costs, stage) for stage in range(self.num_stages))

    @property
    def whole_memory(self) -> tuple[float, ...]:
        """Rank -> memory of one microbatch on the rank if every stage of the rank keeps all activations."""
        return self.placement.sums([footprint.whole for footprint in self.footprints])

    @cached_property
    def allocation(self) -> tuple[float, ...]:
        """Code of an operation -> memory that the operation allocates (F, R, S) or, with a negative sign, releases."""
        f = tuple(each.whole for each in self.footprints)
        b = tuple(each.after_b - each.whole for each in self.footprints)
        w = tuple(each.after_w - each.after_b for each in self.footprints)
        r = tuple(each.restored for each in self.footprints)
        dropped = tuple(each.dropped for each in self.footprints)
        memory = self.costs.memory
        shards = (memory[kind] for kind in self.codes.first if kind in VOCABULARY)
        return f + b + w + r + dropped + tuple(chain.from_iterable(shards))

    def is_dropped_as_a_rule(self, stage: int) -> bool:
        """Whether most microbatches of `stage` have an R: true under full recomputation, except on the last stage."""
        return self.recompute is Recompute.FULL and stage < self.num_stages - 1

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Rank -> total time of its operations, with R only on stages where most microbatches have an R."""
        kinds = (self.codes.f, self.codes.b, self.codes.w, *self.codes.on_shards)
        times = [
            sum(self.duration[first + s] for first in (*kinds, *(self.codes.r,) * self.is_dropped_as_a_rule(s)))
            for s in range(self.num_stages)
        ]
        return tuple(self.num_microbatches * time for time in self.placement.sums(times))

    @cached_property
    def bound_if_fused(self) -> float:
        """A lower bound on the longest span of a rank, for schedules with fused or separate B and W."""
        return lower_bound(self.placement, self.num_microbatches, self.costs, self.limits, self.recompute)

    @cached_property
    def bound(self) -> float:
        """A lower bound on the makespan if `takes_makespan` is set, otherwise on the longest span of a rank."""
        if_fused = self.bound_if_fused
        if self.recompute is Recompute.FULL:
            return if_fused
        if self.takes_makespan:
            earliest = accumulate(map(add, self.latency, self.message), initial=0.0)
            # A rank may run the embedding of its shard before its first F could start.
            later = (
                work - self.num_microbatches * self.duration[self.codes.e + rank] for rank, work in enumerate(self.work)
            )
            return max(if_fused, *map(add, later, earliest))
        # Without overlap, the span of a rank contains all its messages except the message before its first F.
        firsts = (self.receiving[stages[0]] for stages in self.stages_of)
        return max(if_fused, *(work - first for work, first in zip(self.work, firsts, strict=True)))

    @cached_property
    def smallest_limits(self) -> tuple[float, ...]:
        """Rank -> smallest possible peak memory with separate B and W: the peak if one microbatch runs at a time."""
        smallest = []
        for stages in self.stages_of:
            footprints = [self.footprints[s] for s in stages]
            after_w = sum(each.after_w for each in footprints)
            peak = sum(each.whole for each in footprints)
            if self.recomputes:
                # One microbatch has all activations on one stage; earlier stages lack the activations of their R.
                peak = max(
                    sum(f.dropped for f in footprints[:i]) + here.whole + sum(f.after_w for f in footprints[i + 1 :])
                    for i, here in enumerate(footprints)
                )
            smallest.append(peak + self.costs.memory_s[stages[0]] + (self.num_microbatches - 1) * after_w)
        return tuple(smallest)
