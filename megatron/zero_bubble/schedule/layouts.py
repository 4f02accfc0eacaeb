"""Searches how a model is laid out on pipeline ranks: partition, placement, chunks and recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import add

from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.generators import generate
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.model_costs import ModelCosts, Partition, even_partition
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.schedule.search.partitions import Balance, balanced_partition, neighbours
from megatron.zero_bubble.schedule.search.problem import BUDGET
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.timeline import Timeline

CHUNKS = (2, 3, 4)
"""Model chunks a rank that are tried for interleaved placements."""
SEARCHED = 2
"""So many placements are searched further: those whose balanced partition takes least."""
PROMISING_EVEN = 1.1
"""The even partition is planned if it could take this much longer than the balanced one, if no rank ever waited."""
PROMISING = 1.02
"""Partitions are planned if they could take this much longer than the best, if no rank ever waited."""
MOST_MOVES = 6
"""Further partitions that are planned for a placement, unless it has many operations."""
MOVED_OPERATIONS = 20_000
"""Operations that the plans of further partitions have together, if that allows more than one."""
MUCH_BUBBLE = 0.25
"""Bubble rate of the best layout from which on all placements are also tried with the next way to recompute."""
WORTH_RECOMPUTING = 0.05
"""Bubble rate from which on recomputation is tried although everything has room."""
WORTH_SHARDING = 0.05
"""Idle share of all ranks' time in the best layout from which on the vocabulary is tried spread over the ranks."""
SHARDING_GAIN = 1.05
"""How many times as fast a layout with vocabulary shards has to be, because collectives also take processor time."""
SIMPLER = 1.02
"""A simpler layout is preferred if it takes at most this much longer: measured costs are no more exact."""


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
    def complexity(self) -> tuple[int, int, int, int]:
        """What a simpler layout has less of: vocabulary shards, chunks a rank, recomputation, sizes of stages."""
        sizes = len(set(self.partition))
        return self.vocabulary_parallel, self.placement.num_chunks, self.recompute is not Recompute.NONE, sizes


@dataclass(frozen=True)
class LayoutPlan:
    """A layout with the schedule planned for it."""

    layout: Layout
    timeline: Timeline
    states: tuple[float, ...]
    """Rank -> memory of parameters, gradients and optimizer states."""
    limits: tuple[float, ...] | None
    """Rank -> the memory limit of its activations; None without one."""
    post_validation: bool = False

    @property
    def time(self) -> float:
        """The predicted time of a step, without the optimizer's.

        With post-validation steps follow each other closely, so that the longest span of a rank counts.
        """
        return self.timeline.cost if self.post_validation else self.timeline.makespan

    @cached_property
    def memory(self) -> float:
        """What the fullest rank needs: its states, and its activations at their peak."""
        return max(map(add, self.states, self.timeline.peak_memory))


@dataclass(frozen=True)
class LayoutProblem:
    """What a layout is searched for, and what is fixed already.

    Attributes:
        schedule: name of the schedule that is planned for a layout, for any placement among them.
        placements: those to choose from.
        recomputes: what may be recomputed. All but the first are tried only where the best layout has a bubble.
        vocabulary_parallel: whether the vocabulary is spread over the ranks; None for where that is faster.
        partition: the layers of every stage, if they are fixed.
        capacity: memory of a rank for its states and activations, in the unit of the costs; None for no limit.
        activations: memory of a rank for its activations alone; None for no limit.
        group_size, post_validation, budget: as `generate` takes them.
    """

    model: ModelCosts
    num_ranks: int
    num_microbatches: int
    schedule: str = "auto"
    placements: tuple[Placement, ...] = ()
    recomputes: tuple[Recompute, ...] = (Recompute.NONE,)
    vocabulary_parallel: bool | None = False
    partition: Partition | None = None
    capacity: float | None = None
    activations: float | None = None
    group_size: int | None = None
    post_validation: bool = False
    budget: int = BUDGET

    def model_of(self, layout: Layout) -> ModelCosts:
        """The costs of the model's units, and of what is spread over the ranks, in this layout."""
        return self.model.vocabulary_parallel(self.num_ranks) if layout.vocabulary_parallel else self.model

    def limits(self, layout: Layout) -> tuple[float, ...] | None:
        """Rank -> the memory that is left to its activations. Raises `Infeasible` if its states leave none."""
        if self.capacity is None:
            return None if self.activations is None else (self.activations,) * self.num_ranks
        states = self.model_of(layout).states(layout.partition, layout.placement)
        if max(states) >= self.capacity:
            raise Infeasible(
                f"parameters, gradients and optimizer states need {max(states):g} of the {self.capacity:g} of a rank",
                max(states),
            )
        left = (self.capacity - state for state in states)
        return tuple(left if self.activations is None else (min(self.activations, each) for each in left))

    def plan(self, layout: Layout, schedule: str | None = None) -> LayoutPlan:
        """The layout with a schedule, by default that of the problem.

        Raises:
            ScheduleError: there is none, or (as `Infeasible`) none in the memory.
        """
        model, limits = self.model_of(layout), self.limits(layout)
        costs = model.of_stages(layout.partition, layout.placement)
        made = generate(
            schedule or self.schedule,
            self.num_ranks,
            self.num_microbatches,
            costs=costs,
            num_chunks=layout.placement.num_chunks,
            placement_kind=layout.placement.kind,
            memory_limit=limits,
            group_size=self.group_size if layout.placement.kind == "interleaved" else None,
            post_validation=self.post_validation,
            recompute=layout.recompute,
            vocabulary_parallel=layout.vocabulary_parallel,
            budget=self.budget,
        )
        timeline = simulate(made, costs)
        states = model.states(layout.partition, layout.placement)
        return LayoutPlan(layout, timeline, states, limits, self.post_validation)


def all_placements(num_ranks: int) -> tuple[Placement, ...]:
    """The placements to choose from where nothing is fixed."""
    interleaved = (Placement("interleaved", num_ranks, chunks) for chunks in CHUNKS)
    return (Placement("linear", num_ranks), Placement("v", num_ranks, 2), *interleaved)


def search_layouts(problem: LayoutProblem) -> list[LayoutPlan]:
    """The best layout found for every placement, the best of all first.

    Raises:
        Infeasible: nothing fits, with the smallest limit of the layouts that were tried.
        ScheduleError: there are fewer layers than stages, or another reason why no schedule can be planned.
    """
    quick = replace(problem, budget=0)
    plans: list[LayoutPlan] = []
    refused: list[ScheduleError] = []
    for recompute in problem.recomputes:
        layouts = (
            Layout(placement, (), recompute, bool(problem.vocabulary_parallel)) for placement in problem.placements
        )
        tried = [_start(quick, layout) for layout in layouts]
        plans += (plan for plan in tried if isinstance(plan, LayoutPlan))
        refused += (error for error in tried if isinstance(error, ScheduleError))
        if plans and min(plans, key=_time).timeline.bubble_rate < MUCH_BUBBLE:
            break
    if not plans and problem.vocabulary_parallel is None:
        return search_layouts(replace(problem, vocabulary_parallel=True))
    if not plans:
        infeasible = [error for error in refused if isinstance(error, Infeasible)]
        raise min(infeasible, key=lambda error: error.smallest_limit) if infeasible else refused[0]
    plans.sort(key=_time)
    if problem.partition is None:
        plans = [_improved(quick, plan) if _is_searched(place, plan) else plan for place, plan in enumerate(plans)]
    if problem.vocabulary_parallel is None:
        plans += _sharding(quick, sorted(plans, key=_time))
    plans = sorted([*plans, *_recomputing(quick, plans)], key=_time)
    chosen, *others = _in_order(plans)
    best = [chosen, problem.plan(chosen.layout)]
    if chosen.layout.vocabulary_parallel and problem.partition is None:
        # Stages are as long as their layers; a quick plan of even ones may have been worse by chance.
        best += filter(None, [_even(problem, chosen.layout)])
    return [min(best, key=_time), *others]


def _is_searched(place: int, plan: LayoutPlan) -> bool:
    """Whether a placement is searched further: if it is among the best, or simple and so quickly planned."""
    return place < SEARCHED or plan.layout.placement.num_chunks == 1


def _time(plan: LayoutPlan) -> float:
    return plan.time


def _start(problem: LayoutProblem, layout: Layout) -> LayoutPlan | ScheduleError:
    """The plan to begin with: of the given partition, or of the better one of the balanced and the even.

    The partition of `layout` is replaced.
    """
    if problem.partition is not None:
        return _planned(problem, replace(layout, partition=problem.partition))
    partition = balanced_partition(_balance(problem, layout))
    if partition is None:
        stages = layout.placement.num_stages
        return ScheduleError(f"{len(problem.model.layers)} layers are not enough for {stages} stages")
    layout = replace(layout, partition=partition)
    balanced, even = _planned(problem, layout), _even(problem, layout)
    return even if even is not None and (isinstance(balanced, ScheduleError) or even.time < balanced.time) else balanced


def _balance(problem: LayoutProblem, layout: Layout) -> Balance:
    room = inf if problem.capacity is None else problem.capacity
    model = problem.model_of(layout)
    return Balance(model, layout.placement, problem.num_microbatches, layout.recompute, room)


def _planned(problem: LayoutProblem, layout: Layout) -> LayoutPlan | ScheduleError:
    try:
        return problem.plan(layout)
    except ScheduleError as error:
        return error


def _improved(problem: LayoutProblem, best: LayoutPlan) -> LayoutPlan:
    """The best of some partitions that moving single layers gives; the even one if that is as good."""
    balance = _balance(problem, best.layout)
    even = best if len(set(best.layout.partition)) == 1 else _even(problem, best.layout)
    operations = 3 * best.layout.placement.num_stages * problem.num_microbatches
    moves = max(1, min(MOST_MOVES, MOVED_OPERATIONS // operations))
    seen = {best.layout.partition}
    while True:
        untried = [each for each in neighbours(balance, best.layout.partition, PROMISING) if each not in seen]
        for partition in untried[: moves + 1 - len(seen)]:
            seen.add(partition)
            plan = _planned(problem, replace(best.layout, partition=partition))
            if isinstance(plan, LayoutPlan) and plan.time < best.time * (1 - 1e-9):
                best = plan
                break
        else:
            return even if even is not None and even.time <= best.time * SIMPLER else best


def _even(problem: LayoutProblem, layout: Layout) -> LayoutPlan | None:
    """The plan with as many layers on every stage.

    None if that cannot be, could not be as short as the layout's, or is the layout itself.
    """
    num_layers, num_stages = len(problem.model.layers), layout.placement.num_stages
    if num_layers % num_stages:
        return None
    partition = even_partition(num_layers, num_stages)
    if partition == layout.partition:
        return None
    balance = _balance(problem, layout)
    if balance.estimate(partition) > balance.estimate(layout.partition) * PROMISING_EVEN:
        return None
    plan = _planned(problem, replace(layout, partition=partition))
    return plan if isinstance(plan, LayoutPlan) else None


def _sharding(problem: LayoutProblem, plans: Sequence[LayoutPlan]) -> Iterator[LayoutPlan]:
    """The plans of the best placements with the vocabulary spread over the ranks, if shorter than all others."""
    if plans[0].timeline.idle.total < WORTH_SHARDING:
        return
    for plan in plans[:SEARCHED]:
        sharded = _start(problem, replace(plan.layout, vocabulary_parallel=True))
        if isinstance(sharded, LayoutPlan) and sharded.time * SHARDING_GAIN < plans[0].time:
            yield sharded


def _recomputing(problem: LayoutProblem, plans: Sequence[LayoutPlan]) -> Iterator[LayoutPlan]:
    """The best layout with the other ways to recompute, where that makes its schedule shorter."""
    best = min(plans, key=_time)
    if best.timeline.bubble_rate < WORTH_RECOMPUTING:
        return
    for recompute in problem.recomputes[problem.recomputes.index(best.layout.recompute) + 1 :]:
        other = _planned(problem, replace(best.layout, recompute=recompute))
        if isinstance(other, LayoutPlan) and other.time < best.time * (1 - 1e-9):
            yield other


def _in_order(plans: Iterable[LayoutPlan]) -> list[LayoutPlan]:
    """The plans from the shortest to the longest, but first the simplest of those that take hardly longer."""
    ordered = sorted(plans, key=_time)
    short = [plan for plan in ordered if plan.time <= ordered[0].time * SIMPLER]
    chosen = min(short, key=lambda plan: plan.layout.complexity)
    return [chosen, *(plan for plan in ordered if plan is not chosen)]
