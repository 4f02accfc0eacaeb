"""Searches for the best layout of a model: placement, chunks, partition, recomputation and vocabulary shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from operator import itemgetter

from megatron.zero_bubble.planner.balance import Balance
from megatron.zero_bubble.planner.bounds import lower_bound
from megatron.zero_bubble.planner.choice import (
    SHARDING_GAIN,
    SIMPLER,
    best_of_combinations,
    choose,
    named_after_schedule,
)
from megatron.zero_bubble.planner.layout_plan import Plan, computing_of, limits_of, plan_layout, with_slowdown
from megatron.zero_bubble.planner.megatrons_split import time_of_usual
from megatron.zero_bubble.planner.partitions import balanced_partition, neighbours
from megatron.zero_bubble.planner.request import DRAFT_EFFORT, Layout, PlanRequest
from megatron.zero_bubble.planner.search_extent import MORE_CHUNKS, PROMISING, Extent, extent_of, most_moves
from megatron.zero_bubble.schedule.costs import LARGEST
from megatron.zero_bubble.schedule.errors import Infeasible, ScheduleError
from megatron.zero_bubble.schedule.ir import Placement
from megatron.zero_bubble.schedule.model_costs import spread_layers
from megatron.zero_bubble.schedule.recomputation import Recompute

WITHOUT_GAIN = 3
"""If a plan fits, recomputation is tried until this number of successive combinations bring no speedup."""
GAIN = 1.003
"""A layout is planned with more effort only if its lower bound is below the best plan's time divided by this factor."""
COMPARED = 1.5
"""Plans that take at most this many times as long as the fastest plan are compared by their expected times."""
WORTH_RECOMPUTING = 1.01
"""Recomputation is tried if no plan fits in memory, or if unlimited memory makes a plan faster by this factor."""
EFFORT_FOR_LATENCY = DRAFT_EFFORT
"""Effort of the first plan of a layout with vocabulary shards, if collectives are slower than messages."""
EFFORT_FOR_RECOMPUTING = 3_000
"""Effort of the first plan of a layout with planned recomputation, in a small problem."""
PROMISING_PARTITION = 1.02
"""A partition with one layer moved is not planned if its estimated time exceeds both the time of the plan before the
move and this factor times the estimated time before the move."""
MOST_BOUNDED = 40
"""Largest number of partitions with one layer moved whose lower bounds are computed."""


def search_layouts(request: PlanRequest, report: Callable[[str], None] = lambda text: None) -> Plan:
    """Search for the best layout of a model, and plan its schedule.

    First, the search plans combinations of placement and vocabulary parallelism with little effort, in the order of
    their lower bounds, until the lower bounds of all other combinations exceed the best plan's time. Numbers of chunks
    per rank above four are tried in rising order until the plan gets no faster. Where more memory would speed up plans,
    recomputation is tried, too. Second, single layers of the best layouts are moved to other stages while the plan gets
    faster. Third, the best layouts are planned in rounds, each with more effort than the previous round.

    Args:
        request: a request with the costs of a model's units. The search keeps the layout `request.usual` unless another
            layout is faster by the factor `SIMPLER`. The time of the layout `request.usual` is the shorter of its times
            under the planned schedule and under megatron-core's own schedule.
        report: function that is called with one line of progress before a layout is planned.

    Returns:
        The plan of the chosen layout, whose `others` are plans with other combinations of placement, recomputation and
        vocabulary parallelism. Slower combinations have draft plans (see `Plan.is_draft`).

    Raises:
        Infeasible: no layout fits in memory. The attribute `smallest_limit` of the error is the smallest memory limit
            in which a layout fits.
        ScheduleError: there are fewer layers than stages, or no schedule exists for another reason.
    """
    extent = extent_of(request)
    search = _Search(request, extent, report)
    if request.usual is not None and request.allows(request.usual):
        search.try_first(request.usual)
    search.plan_combinations()
    if not search.plans:
        for layout in list(search.efforts):
            search.try_plan(layout, request.effort)
    if not search.plans:
        infeasible = [error for error in search.refused if isinstance(error, Infeasible)]
        raise min(infeasible, key=lambda error: error.smallest_limit) if infeasible else search.refused[0]
    if request.partition is None:
        for plan in search.best(extent.num_moved, extent.worth_moving):
            search.move_layers(plan)
    for num_best, effort in extent.rounds:
        for plan in search.best(num_best, extent.promising, can_improve=True):
            search.improve(plan, min(effort, request.effort))
    search.improve_usual()
    plans = [replace(plan, is_draft=search.is_draft(plan.layout)) for plan in search.expected()]
    if len(request.recomputes) > 1:
        plans = list(map(named_after_schedule, plans))
    return choose(plans, request.usual, time_of_usual(request))


class _Search:
    """The state of a search: the best plan found so far for every layout."""

    def __init__(self, request: PlanRequest, extent: Extent, report: Callable[[str], None]) -> None:
        self.request = request
        self._extent = extent
        self._report = report
        self.plans: dict[Layout, Plan] = {}
        self.refused: list[ScheduleError] = []
        self.efforts: dict[Layout, int] = {}
        """Layout -> the largest effort with which the layout has been planned."""
        self._num_planned = 0

    @property
    def best_time(self) -> float:
        """The shortest time of all plans; infinity before the first plan."""
        return self.time_of(self.plans)

    def time_of(self, layouts: Iterable[Layout]) -> float:
        """The shortest time of the plans of the given layouts; infinity if none of the layouts has a plan."""
        return min((self.plans[layout].time for layout in layouts if layout in self.plans), default=inf)

    def best(self, count: int, factor: float, *, can_improve: bool = False) -> list[Plan]:
        """The `count` fastest plans, at most one for each combination of placement and vocabulary parallelism.

        In small problems, combinations differ in recomputation, too. Plans that take more than `factor` times the
        shortest time are left out. If there are other plans, the plan of the layout `request.usual` is left out. If
        `can_improve` is true, plans whose layouts cannot become the fastest (see `_can_be_fastest`) are left out.
        """
        others = [plan for plan in self.plans.values() if plan.layout != self.request.usual] or [*self.plans.values()]
        longest = min(plan.time for plan in others) * factor
        best: dict[tuple[Placement, bool, Recompute | None], Plan] = {}
        for plan in sorted(others, key=lambda plan: (plan.time, plan.layout.complexity)):
            layout = plan.layout
            kind = (layout.placement, layout.vocabulary_parallel, layout.recompute if self._extent.is_small else None)
            if plan.time <= longest and kind not in best and (not can_improve or self._can_be_fastest(layout)):
                best[kind] = plan
        return list(best.values())[:count]

    def try_plan(self, layout: Layout, effort: int) -> Plan | None:
        """Plan a layout, unless it was planned with at least `effort` before; return the layout's best plan or None."""
        if self.efforts.get(layout, -1) < effort:
            self._report(f"{self._num_planned} schedules planned for {len(self.efforts)} layouts")
            self._num_planned += 1
            self.efforts[layout] = effort
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
        """Whether `plan` is faster than `known`; above `DRAFT_EFFORT`, times include slowdown (see `with_slowdown`)."""
        if plan.request.effort > DRAFT_EFFORT:
            plan, known = with_slowdown(plan), with_slowdown(known)
        return plan.time < known.time

    def try_first(self, layout: Layout) -> Plan | None:
        """Plan a layout with little effort; return the best plan of the layout, or None if the layout has no plan."""
        model = self.request.model
        has_latency = layout.vocabulary_parallel and model.latency_collective > model.time_comm
        least = EFFORT_FOR_RECOMPUTING if layout.recompute is Recompute.PLANNED else 0
        effort = EFFORT_FOR_LATENCY if has_latency else least
        return self.try_plan(layout, effort if self._extent.is_small else 0)

    def plan_combinations(self) -> None:
        """Plan layouts with little effort in the order of their lower bounds; skip layouts that the bound rules out."""
        request = self.request
        vocabularies = (False, True) if request.vocabulary_parallel is None else (request.vocabulary_parallel,)
        first, *further = request.recomputes
        usual = None if request.usual is None else request.usual.placement
        more = [each for each in request.placements if each.num_chunks in MORE_CHUNKS and each != usual]
        few = [placement for placement in request.placements if placement not in more]
        combinations = [Layout(*axes) for axes in product(few or more, ((),), (first,), vocabularies)]
        layouts = [layout for combination in combinations for layout in self._first_layouts(combination)]
        planned: dict[Layout, list[Layout]] = {}
        for bound, _, layout in sorted((self._bound(layout), number, layout) for number, layout in enumerate(layouts)):
            # `choose` may prefer a simpler layout that is a little slower.
            if bound < self.best_time * (SIMPLER if layout.vocabulary_parallel else SHARDING_GAIN):
                planned.setdefault(layout.combination, []).append(layout)
                self.try_first(layout)
        for vocabulary in vocabularies if few else ():
            planned.update(self._plan_more_chunks([Layout(placement, (), first, vocabulary) for placement in more]))
        for recompute in further:
            self._plan_recomputing(recompute, list(planned.values()))

    def _plan_recomputing(self, recompute: Recompute, combinations: Sequence[Sequence[Layout]]) -> None:
        """Try recomputation in given combinations, the most promising first (see `WITHOUT_GAIN`)."""
        num_without_gain, promising = 0, [(self._time_with_memory(layouts), layouts) for layouts in combinations]
        for time, layouts in sorted(promising, key=itemgetter(0)):
            if time >= self.best_time or (self.plans and num_without_gain >= WITHOUT_GAIN):
                return
            tried = list(self._first_layouts(replace(layouts[0], partition=(), recompute=recompute)))
            for layout in tried:
                self.try_first(layout)
            gains = self.time_of(tried) < self.time_of(layouts) * (1 - 1e-9)
            num_without_gain = 0 if gains else num_without_gain + 1

    def _plan_more_chunks(self, combinations: Sequence[Layout]) -> dict[Layout, list[Layout]]:
        """Plan layouts with increasing numbers of chunks per rank, until a larger number does not speed up the plan."""
        planned: dict[Layout, list[Layout]] = {}
        shortest = self.best_time
        for combination in combinations:
            layouts = list(self._first_layouts(combination))
            # `choose` prefers fewer chunks unless more chunks are faster by the factor `SIMPLER`.
            if not layouts or min(map(self._bound, layouts)) * SIMPLER >= self.best_time:
                break
            for layout in layouts:
                self.try_first(layout)
            planned[combination] = layouts
            time = self.time_of(layouts)
            if time > shortest / GAIN:
                break
            shortest = time
        return planned

    def _time_with_memory(self, layouts: Sequence[Layout]) -> float:
        """Time of the fastest of `layouts` if memory is unlimited; infinity if unlimited memory saves little time."""
        layout = min(layouts, key=lambda layout: self.time_of([layout]))
        limits = (LARGEST,) * self.request.num_ranks
        unlimited = replace(self.request, memory_limit=limits, capacity=None, usual_capacity=None, effort=0)
        try:
            time = plan_layout(unlimited, layout).time
        except ScheduleError:  # no schedule exists for the layout, however large the memory
            return inf
        planned = self.time_of([layout])
        return inf if planned < inf and time > planned / WORTH_RECOMPUTING else time

    def _first_layouts(self, layout: Layout) -> Iterator[Layout]:
        """Yield the layout with the request's partition or, if there is none, with balanced and even partitions."""
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
        """A lower bound on the time of any plan of a layout; zero if its costs or memory limits raise an error."""
        request, model = self.request, computing_of(self.request, layout)
        try:
            states = model.states(layout.partition, layout.placement)
            limits = limits_of(request, states, request.capacity_of(layout))
            costs = model.of_stages(layout.partition, layout.placement)
        except ScheduleError:
            return 0.0
        # Recomputation, which is tried later, may lower the memory of a microbatch.
        weakest = layout.recompute if len(request.recomputes) == 1 else Recompute.PLANNED
        limits = None if request.offloads else limits  # with copies, a microbatch may take no memory
        bound = lower_bound(layout.placement, request.num_microbatches, costs, limits, weakest)
        if request.post_validation or layout.recompute is Recompute.FULL:  # a plan may run fewer R than estimated
            return bound
        cheapest = replace(request, costs=request.model.with_cheapest_weight_gradients)
        return max(bound, _balance(cheapest, layout).estimate(layout.partition))

    def _can_be_fastest(self, layout: Layout) -> bool:
        """Whether the layout's lower bound is below the best plan's time divided by `GAIN`."""
        return self._bound(layout) < self.best_time / GAIN

    def is_draft(self, layout: Layout) -> bool:
        """Whether all plans of the layout's combination were made with little effort (see `Plan.is_draft`)."""
        efforts = (effort for each, effort in self.efforts.items() if each.combination == layout.combination)
        return max(efforts) <= DRAFT_EFFORT

    def improve(self, plan: Plan, effort: int) -> None:
        """Plan the layout of `plan` with `effort` if the layout can become the fastest."""
        if self._can_be_fastest(plan.layout):
            self.try_plan(plan.layout, effort)

    def improve_usual(self) -> None:
        """Plan the layout `request.usual` with full effort, unless its plan is much slower than the best plan."""
        usual = self.plans.get(self.request.usual) if self.request.usual is not None else None
        if usual is not None and usual.time <= self.best_time * PROMISING**2:
            self.try_plan(usual.layout, self.request.effort)

    def expected(self) -> list[Plan]:
        """All plans; if durations vary, one plan per `Layout.combination`, with its expected time (see `COMPARED`)."""
        model, usual = self.request.model, self.request.usual
        if model.spread <= 0 and model.time_between <= 0:
            return list(self.plans.values())
        longest = self.best_time * COMPARED
        best = best_of_combinations(list(self.plans.values()), usual)
        return [with_slowdown(plan) for plan in best if plan.time <= longest]

    def move_layers(self, plan: Plan) -> None:
        """Move single layers to other stages and plan each partition with little effort, while the plan gets faster."""
        layout = plan.layout
        balance = _balance(self.request, layout)
        moves = most_moves(self.request, layout.placement)
        seen = {layout.partition}
        best: Plan | None = plan
        while best is not None and len(seen) <= moves:
            plan, best = best, None
            longest = max(plan.time, balance.estimate(plan.layout.partition) * PROMISING_PARTITION)
            near = neighbours(balance, plan.layout.partition, longest)[:MOST_BOUNDED]
            bounds = {each: self._bound(replace(layout, partition=each)) for each in near if each not in seen}
            for partition in sorted(bounds, key=bounds.__getitem__):
                if len(seen) > moves or bounds[partition] >= plan.time:
                    break
                seen.add(partition)
                moved = self.try_first(replace(layout, partition=partition))
                if moved is not None and moved.time < plan.time * (1 - 1e-9):
                    best = moved
                    break


def _balance(request: PlanRequest, layout: Layout, *, in_blocks: bool = False) -> Balance:
    model, room = computing_of(request, layout), inf if request.capacity is None else request.capacity
    options = request.num_microbatches, layout.recompute, room, request.limits
    return Balance(model, layout.placement, *options, in_blocks=in_blocks)
