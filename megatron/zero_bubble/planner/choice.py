"""Chooses the final plan among plans of different layouts; prefers a simpler layout that is only a little slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from megatron.zero_bubble.planner.layout_plan import Plan
from megatron.zero_bubble.planner.partitions import ALIKE, unevenness
from megatron.zero_bubble.planner.request import Layout
from megatron.zero_bubble.schedule.recomputation import Recompute

SIMPLER = 1.02
"""A simpler layout is chosen if its plan is slower by at most this factor (about the error of measured costs)."""
SHARDING_GAIN = 1.03
"""Least speedup at which a layout with vocabulary shards, whose collectives cost CPU time, is chosen."""


def choose(plans: Sequence[Plan], usual: Layout | None, usual_time: float = inf) -> Plan:
    """Choose a plan among plans of different layouts.

    A plan is close to the fastest plan if it takes at most `SIMPLER` times as long. The factor is `SHARDING_GAIN` if
    the fastest plan has vocabulary shards and the other plan has none. The plan of the layout `usual` is chosen if the
    shorter of the plan's time and `usual_time` is close to the time of the fastest plan. Otherwise, the plan with the
    simplest layout is chosen among the close plans that are faster than the layout `usual` by the factor `SIMPLER` and,
    with vocabulary shards, faster than all plans without by the factor `SHARDING_GAIN`.

    Args:
        plans: one or more plans; several plans may have the same `Layout.combination`, and differ in their partition.
        usual: the layout that is kept unless another layout is clearly faster; None if no layout is preferred.
        usual_time: time of another schedule for the layout `usual`, such as megatron-core's own schedule.

    Returns:
        The chosen plan, whose `others` are the best plans of other combinations (see `Layout.combination`), the fastest
        first. Planned recomputation is left out if the same combination without recomputation is not slower.
    """
    ordered = sorted(best_of_combinations(plans, usual), key=lambda plan: plan.time)
    shortest = ordered[0]
    longest = shortest.time * SIMPLER

    def is_close(plan: Plan) -> bool:
        saves_shards = shortest.layout.vocabulary_parallel and not plan.layout.vocabulary_parallel
        time = min(plan.time, usual_time) if plan.layout == usual else plan.time
        return time <= (shortest.time * SHARDING_GAIN if saves_shards else longest)

    def gains(plan: Plan) -> bool:
        """Whether the plan is clearly faster than the layout `usual` and, with shards, than plans without shards."""
        has_shards, usual_shards = plan.layout.vocabulary_parallel, usual is not None and usual.vocabulary_parallel
        over_usual = SHARDING_GAIN if has_shards and not usual_shards else SIMPLER
        return plan.time * over_usual < time_of_usual and (not has_shards or plan.time * SHARDING_GAIN < without_shards)

    time_of_usual = min((min(plan.time, usual_time) for plan in ordered if plan.layout == usual), default=inf)
    without_shards = min((plan.time for plan in ordered if not plan.layout.vocabulary_parallel), default=inf)
    close = [plan for plan in ordered if is_close(plan)]
    if not any(plan.layout == usual for plan in close):
        close = [plan for plan in close if gains(plan)] or [plan for plan in ordered if plan.layout == usual]
    chosen = min(close, key=lambda plan: (plan.layout != usual, plan.layout.complexity))
    others = {plan.layout.combination: plan for plan in reversed(ordered)}

    def recomputes_in_vain(plan: Plan) -> bool:
        keeping = others.get(replace(plan.layout.combination, recompute=Recompute.NONE))
        return plan.layout.recompute is Recompute.PLANNED and keeping is not None and keeping.time <= plan.time

    others = {combination: plan for combination, plan in others.items() if not recomputes_in_vain(plan)}
    others.pop(chosen.layout.combination, None)
    return replace(chosen, is_draft=False, others=tuple(sorted(others.values(), key=lambda plan: plan.time)))


def best_of_combinations(plans: Sequence[Plan], usual: Layout | None) -> list[Plan]:
    """The best plan of each `Layout.combination` (layout without partition), and the plan of the layout `usual`.

    The plans of a combination are compared with the combination's fastest plan. Among the plans that take at most
    `ALIKE` times as long, the plan with the most even partition is the best. The factor `ALIKE` keeps small errors in
    the measured costs from changing the choice.
    """
    groups: dict[Layout, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.layout if plan.layout == usual else plan.layout.combination, []).append(plan)
    best = []
    for group in groups.values():
        longest = min(plan.time for plan in group) * ALIKE
        alike = (plan for plan in group if plan.time <= longest)
        best.append(min(alike, key=lambda plan: unevenness(plan.layout.partition)))
    return best


def named_after_schedule(plan: Plan) -> Plan:
    """The given plan, with `Recompute.NONE` in place of `Recompute.PLANNED` if the plan's schedule has no R."""
    if plan.layout.recompute is not Recompute.PLANNED or plan.timeline.schedule.recomputes:
        return plan
    return replace(plan, layout=replace(plan.layout, recompute=Recompute.NONE))
