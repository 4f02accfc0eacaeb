"""Searches how a model is laid out on pipeline ranks: placement, chunks, partition, recomputation and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from operator import itemgetter

from megatron.zero_bubble.planner.bounds import lower_bounds
from megatron.zero_bubble.planner.choice import (
    SHARDING_GAIN,
    SIMPLER,
    best_of_combinations,
    choose,
    named_after_schedule,
)
from megatron.zero_bubble.planner.layout_plan import Plan, limits_of, model_of, pairs_in, plan_layout, with_slowdown
from megatron.zero_bubble.planner.partitions import Balance, balanced_partition, neighbours
from megatron.zero_bubble.planner.request import QUICK_EFFORT, Layout, PlanRequest
from megatron.zero_bubble.schedule.costs import LARGEST
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.model_costs import spread_layers
from megatron.zero_bubble.schedule.recomputation import Recompute

CHUNKS = (2, 3, 4)
"""Model chunks a rank that are tried for interleaved placements."""
MORE_CHUNKS = (5, 6, 8, 10, 12, 16)
"""Model chunks that are tried one after the other, while each makes the plan `GAIN` times as fast as the one before."""
PROMISING = 1.05
"""A layout is planned with more effort if its plan takes at most this much longer than the best one."""
ROUNDS = ((3, 5), (1, 2))
"""How many of the best layouts are planned in each round, and the part of the full effort that is spent on each."""
QUICK_ROUNDS = ((3, 5), (1, 1))
"""The same where the effort is that of an estimate."""
SMALL = 3000
"""Up to so many operations of a schedule with two chunks a rank, more layouts are planned in each round."""
ROUNDS_OF_SMALL = ((12, 10), (3, 2))
"""The same as `ROUNDS` for small problems."""
LARGE = 5000
"""From so many operations of a schedule with two chunks a rank on there is one round, because a plan with little effort
takes about as long as one with much."""
ROUNDS_OF_LARGE = ((3, 3),)
"""The same as `ROUNDS` for large problems."""
WITHOUT_GAIN = 3
"""Recomputation is tried until it makes so many placements in a row no faster than the same without it."""
GAIN = 1.003
"""A layout is planned with more effort if it can become this many times as fast as the best."""
COMPARED = 1.5
"""Plans that take at most so much longer than the best are compared with durations that vary."""
MOVED = 4
"""So many of the best plans are tried with other partitions."""
MOVED_OF_SMALL, WORTH_MOVING = 8, 1.2
"""In small problems so many are, and they may take this much longer than the best: where memory is short, a layer less
on the fullest rank changes much."""
WORTH_RECOMPUTING = 1.01
"""Recomputation is tried where unlimited memory would make a plan faster by this factor, or where nothing fits."""
PROMISING_PARTITION = 1.02
"""A partition is planned if its bound is at most this factor times the bound of the neighbouring partition."""
MOST_MOVES = 6
"""Further partitions that are planned for a placement, unless it has many operations."""
MOVED_OPERATIONS = 20_000
"""Operations that the plans of further partitions have together, if that allows more than one."""


def all_placements(num_ranks: int, num_layers: int = 0) -> tuple[Placement, ...]:
    """The placements to choose from where nothing is fixed, up to four chunks a rank, and more for so many layers."""
    # The embedding and the output may have a stage each to themselves.
    more = (chunks for chunks in MORE_CHUNKS if num_ranks * chunks <= num_layers + 2)
    interleaved = (Placement("interleaved", num_ranks, chunks) for chunks in (*CHUNKS, *more))
    return (Placement("linear", num_ranks), Placement("v", num_ranks, 2), *interleaved)


def search_layouts(request: PlanRequest, report: Callable[[str], None] = lambda text: None) -> Plan:
    """The plan of the layout to choose, with the best plans of the others.

    Every combination of placement, recomputation and vocabulary is planned with little effort, in the order of lower
    bounds, until no bound is below the best plan. More than four chunks a rank are planned one number after the other,
    until one is no faster than the number before. Then single layers are moved in the best layouts while that helps,
    and rounds with growing effort plan ever fewer layouts, the best ones of the round before.

    Args:
        request: with the costs of a model's units. Its usual layout is chosen unless another one is faster by the
            factor `SIMPLER`.
        report: called with a line about the progress after every plan.

    Raises:
        Infeasible: nothing fits; with the smallest limit of all layouts.
        ScheduleError: there are fewer layers than stages, or another reason why no schedule can be planned.
    """
    search = _Search(request, report)
    if request.usual is not None and request.allows(request.usual):
        search.try_plan(request.usual, 0)
    search.plan_combinations()
    if not search.plans:
        search.plan_refused()
    if not search.plans:
        infeasible = [error for error in search.refused if isinstance(error, Infeasible)]
        raise min(infeasible, key=lambda error: error.smallest_limit) if infeasible else search.refused[0]
    if request.partition is None:
        for plan in search.best(*search.worth_moving):
            search.move_layers(plan)
    for num_best, divisor in search.rounds:
        for plan in search.best(num_best, search.promising):
            search.improve(plan, request.effort // divisor)
    search.improve_usual()
    plans = search.expected()
    if len(request.recomputes) > 1:
        plans = list(map(named_after_schedule, plans))
    return choose(plans, request.usual)


class _Search:
    """The plans made so far, the best of every layout."""

    def __init__(self, request: PlanRequest, report: Callable[[str], None]) -> None:
        self.request = request
        self._report = report
        self.plans: dict[Layout, Plan] = {}
        self.refused: list[ScheduleError] = []
        self._efforts: dict[Layout, int] = {}
        """Layout -> the most effort that it was planned with."""

    @property
    def is_small(self) -> bool:
        """Whether planning takes so little time that more layouts are planned."""
        return self._num_operations <= SMALL

    @property
    def _num_operations(self) -> int:
        """The F, B and W of a schedule with two chunks a rank."""
        return 6 * self.request.num_ranks * self.request.num_microbatches

    @property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        """How many layouts are planned in each round, and the part of the full effort."""
        if self.is_small:
            return ROUNDS_OF_SMALL
        if self.request.effort <= QUICK_EFFORT:
            return QUICK_ROUNDS
        return ROUNDS if self._num_operations < LARGE else ROUNDS_OF_LARGE

    @property
    def promising(self) -> float:
        """A layout is planned with more effort if its plan takes at most this much longer than the best one."""
        return PROMISING**2 if self.is_small else PROMISING

    @property
    def worth_moving(self) -> tuple[int, float]:
        """How many of the best plans are tried with other partitions, and how much longer than the best they take."""
        return (MOVED_OF_SMALL, WORTH_MOVING) if self.is_small else (MOVED, PROMISING)

    @property
    def best_time(self) -> float:
        """The shortest time of all plans; infinity before there is one."""
        return min((plan.time for plan in self.plans.values()), default=inf)

    def best(self, count: int, factor: float) -> list[Plan]:
        """The best plans, up to `factor` times the shortest time, one of each placement and place of the vocabulary.

        In a small problem it is one of each way to recompute, too. The usual layout does not count among the candidates
        that are improved, because it is improved separately.
        """
        others = [plan for plan in self.plans.values() if plan.layout != self.request.usual] or [*self.plans.values()]
        longest = min(plan.time for plan in others) * factor
        best: dict[tuple[Placement, bool, Recompute | None], Plan] = {}
        for plan in sorted(others, key=lambda plan: (plan.time, plan.layout.complexity)):
            layout = plan.layout
            kind = (layout.placement, layout.vocabulary_parallel, layout.recompute if self.is_small else None)
            if plan.time <= longest:
                best.setdefault(kind, plan)
        return list(best.values())[:count]

    def try_plan(self, layout: Layout, effort: int) -> Plan | None:
        """The best plan of the layout so far, planned with at least this effort; None if there is none."""
        if self._efforts.get(layout, -1) < effort:
            self._report(f"{len(self._efforts)} layouts planned, the best takes {self.best_time:.6g}")
            self._efforts[layout] = effort
            try:
                plan = plan_layout(replace(self.request, effort=effort), layout)
            except ScheduleError as error:
                self.refused.append(error)
            else:
                known = self.plans.get(layout)
                if known is None or self._is_better(plan, known):
                    self.plans[layout] = plan
        return self.plans.get(layout)

    @staticmethod
    def _is_better(plan: Plan, known: Plan) -> bool:
        """Whether a plan of the same layout is faster; only plans with effort were chosen by their expected times."""
        if plan.request.effort > 0:
            plan, known = with_slowdown(plan), with_slowdown(known)
        return plan.time < known.time

    def plan_combinations(self) -> None:
        """Plan all combinations with little effort, until no bound is below the best plan."""
        request = self.request
        vocabularies = (False, True) if request.vocabulary_parallel is None else (request.vocabulary_parallel,)
        first, *further = request.recomputes
        usual = None if request.usual is None else request.usual.placement
        more = [each for each in request.placements if each.num_chunks in MORE_CHUNKS and each != usual]
        few = [placement for placement in request.placements if placement not in more]
        combinations = [Layout(*axes) for axes in product(few or more, ((),), (first,), vocabularies)]
        layouts = [layout for combination in combinations for layout in self._to_begin_with(combination)]
        planned: dict[Layout, list[Layout]] = {}
        for bound, _, layout in sorted((self._bound(layout), number, layout) for number, layout in enumerate(layouts)):
            # A simpler layout may be chosen though it takes a little longer.
            if bound < self.best_time * (1 if layout.vocabulary_parallel else SHARDING_GAIN):
                planned.setdefault(layout.combination, []).append(layout)
                self.try_plan(layout, 0)
        for vocabulary in vocabularies if few else ():
            planned.update(self._plan_more_chunks([Layout(placement, (), first, vocabulary) for placement in more]))
        for recompute in further:
            self._plan_recomputing(recompute, list(planned.values()))

    def _plan_recomputing(self, recompute: Recompute, combinations: Sequence[Sequence[Layout]]) -> None:
        """Plan these combinations with recomputation, first those that would gain most from more memory."""
        num_without_gain = 0
        promising = [(self._time_with_memory(layouts), layouts) for layouts in combinations]
        for time, layouts in sorted(promising, key=itemgetter(0)):
            if time >= self.best_time or num_without_gain >= WITHOUT_GAIN:
                return
            tried = self._to_begin_with(replace(layouts[0], partition=(), recompute=recompute))
            recomputing = [plan.time for layout in tried if (plan := self.try_plan(layout, 0)) is not None]
            keeping = [self.plans[layout].time for layout in layouts if layout in self.plans]
            gains = min(recomputing, default=inf) < min(keeping, default=inf) * (1 - 1e-9)
            num_without_gain = 0 if gains else num_without_gain + 1

    def _plan_more_chunks(self, combinations: Sequence[Layout]) -> dict[Layout, list[Layout]]:
        """Plan these combinations, of ever more chunks a rank, while each is faster than the one before."""
        planned: dict[Layout, list[Layout]] = {}
        shortest = self.best_time
        for combination in combinations:
            layouts = list(self._to_begin_with(combination))
            # Among layouts that differ by less, one with fewer chunks is chosen.
            if not layouts or min(map(self._bound, layouts)) * SIMPLER >= self.best_time:
                break
            plans = [plan for layout in layouts if (plan := self.try_plan(layout, 0)) is not None]
            planned[combination] = layouts
            time = min((plan.time for plan in plans), default=inf)
            if time > shortest / GAIN:
                break
            shortest = time
        return planned

    def _time_with_memory(self, layouts: Sequence[Layout]) -> float:
        """The time of the best of these layouts if memory were unlimited; infinity if it already is no limitation."""
        plans = [self.plans[layout] for layout in layouts if layout in self.plans]
        layout = min(plans, key=lambda plan: plan.time).layout if plans else layouts[0]
        unlimited = replace(self.request.within((LARGEST,) * self.request.num_ranks), capacity=None, effort=0)
        try:
            time = plan_layout(unlimited, layout).time
        except ScheduleError:  # not for lack of memory
            return inf
        return inf if plans and time > min(plan.time for plan in plans) / WORTH_RECOMPUTING else time

    def _to_begin_with(self, layout: Layout) -> Iterator[Layout]:
        """The layout with the given partition, or with the balanced one and Megatron's."""
        request = self.request
        if request.partition is not None:
            yield replace(layout, partition=request.partition)
            return
        num_layers, num_stages = len(request.model.layers), layout.placement.num_stages
        balanced = in_blocks = balanced_partition(_balance(request, layout))
        if balanced is not None and layout.recompute is not Recompute.NONE:
            in_blocks = balanced_partition(_balance(request, layout, in_blocks=True))
        if balanced is None or in_blocks is None:
            self.refused.append(ScheduleError(f"{num_layers} layers are not enough for {num_stages} stages"))
            return
        even = [spread_layers(num_layers, num_stages)] if num_layers >= num_stages else []
        for partition in dict.fromkeys((balanced, in_blocks, *even)):
            yield replace(layout, partition=partition)

    def _bound(self, layout: Layout) -> float:
        """A lower bound on the time of any plan for this layout; zero if planning it is to tell the error."""
        request, model = self.request, model_of(self.request, layout)
        try:
            states = model.states(layout.partition, layout.placement)
            limits = limits_of(request, states, request.capacity_of(layout))
            costs = model.of_stages(layout.partition, layout.placement)
        except ScheduleError:
            return 0.0
        if pairs_in(request, layout):
            costs = model.computing.of_stages(layout.partition, layout.placement)
        # With recomputation, which is tried later, a rank may hold less.
        weakest = layout.recompute if len(request.recomputes) == 1 else Recompute.PLANNED
        # With copies to the host it may hold nothing of a microbatch.
        held = None if request.offloads else limits
        bounds = lower_bounds(layout.placement, request.num_microbatches, costs, held, weakest)
        if request.post_validation:
            return bounds.span
        return max(bounds.span, _balance(request, layout).estimate(layout.partition))

    def improve(self, plan: Plan, effort: int) -> None:
        """Plan a layout with more effort, unless it can gain too little on the best."""
        if self._bound(plan.layout) < self.best_time / GAIN:
            self.try_plan(plan.layout, effort)

    def improve_usual(self) -> None:
        """Plan the usual layout with full effort, unless it is too slow to stay."""
        usual = self.plans.get(self.request.usual) if self.request.usual is not None else None
        if usual is not None and usual.time <= self.best_time * PROMISING**2:
            self.try_plan(usual.layout, self.request.effort)

    def plan_refused(self) -> None:
        """Plan with full effort the layouts for which little effort found nothing that fits."""
        for layout in [layout for layout in self._efforts if layout not in self.plans]:
            self.try_plan(layout, self.request.effort)

    def expected(self) -> list[Plan]:
        """All plans. Where durations vary, only the best of each combination and the usual one, with expected times."""
        model, usual = self.request.model, self.request.usual
        if model.spread <= 0 and model.time_between <= 0:
            return list(self.plans.values())
        longest = self.best_time * COMPARED
        best = best_of_combinations(list(self.plans.values()), usual)
        return [with_slowdown(plan) for plan in best if plan.time <= longest]

    def move_layers(self, plan: Plan) -> None:
        """Plan, with little effort, partitions in which single layers have moved, while that makes the plan shorter."""
        layout = plan.layout
        balance = _balance(self.request, layout)
        operations = 3 * layout.placement.num_stages * self.request.num_microbatches
        moves = max(1, min(MOST_MOVES, MOVED_OPERATIONS // operations))
        seen = {layout.partition}
        best: Plan | None = plan
        while best is not None:
            plan, best = best, None
            for partition in neighbours(balance, plan.layout.partition, PROMISING_PARTITION):
                changed = replace(layout, partition=partition)
                if partition in seen or len(seen) > moves or self._bound(changed) >= plan.time:
                    continue
                seen.add(partition)
                moved = self.try_plan(changed, 0)
                if moved is not None and moved.time < plan.time * (1 - 1e-9):
                    best = moved
                    break


def _balance(request: PlanRequest, layout: Layout, *, in_blocks: bool = False) -> Balance:
    room = inf if request.capacity is None else request.capacity
    model = model_of(request, layout)
    model = model.computing if pairs_in(request, layout) else model
    return Balance(model, layout.placement, request.num_microbatches, layout.recompute, room, in_blocks=in_blocks)
