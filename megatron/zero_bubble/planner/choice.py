"""Chooses between the plans of layouts that a search has made: simpler layouts are preferred to faster ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.zero_bubble.planner.layout_plan import Plan
from megatron.zero_bubble.planner.partitions import ALIKE, unevenness
from megatron.zero_bubble.planner.request import Layout
from megatron.zero_bubble.schedule.recomputation import Recompute

SIMPLER = 1.02
"""A simpler layout is preferred if it takes at most this much longer: measured costs are no more exact."""
SHARDING_GAIN = 1.03
"""How many times as fast a layout with vocabulary shards has to be, because collectives also take processor time."""


def choose(plans: Sequence[Plan], usual: Layout | None) -> Plan:
    """The plan to take, with the best plans of the other combinations, from the shortest to the longest.

    It is the plan of the usual layout, unless another one is faster by the factor `SIMPLER`. Otherwise it is the
    simplest of the plans that take at most `SIMPLER` times as long as the shortest. If the shortest has vocabulary
    shards, plans without them may take `SHARDING_GAIN` times as long.

    Args:
        plans: at least one; several may have the same combination of placement, recomputation and vocabulary.
        usual: the layout that stays where nothing is clearly faster.
    """
    ordered = sorted(best_of_combinations(plans, usual), key=lambda plan: plan.time)
    shortest = ordered[0]
    longest = shortest.time * SIMPLER

    def is_close(plan: Plan) -> bool:
        saves_shards = shortest.layout.vocabulary_parallel and not plan.layout.vocabulary_parallel
        return plan.time <= (shortest.time * SHARDING_GAIN if saves_shards else longest)

    close = [plan for plan in ordered if is_close(plan)]
    as_usual = [plan for plan in close if plan.layout == usual]
    chosen = as_usual[0] if as_usual else min(close, key=lambda plan: plan.layout.complexity)
    others = {plan.layout.combination: plan for plan in reversed(ordered)}
    others.pop(chosen.layout.combination)
    return replace(chosen, others=tuple(sorted(others.values(), key=lambda plan: plan.time)))


def best_of_combinations(plans: Sequence[Plan], usual: Layout | None) -> list[Plan]:
    """The plan of each combination, and that of the usual layout.

    Of partitions whose plans differ by at most `ALIKE` it is the most even one, so that small differences between
    measured costs do not change it.
    """
    groups: dict[Layout, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.layout if plan.layout == usual else plan.layout.combination, []).append(plan)
    return [_most_even(group) for group in groups.values()]


def _most_even(plans: Sequence[Plan]) -> Plan:
    longest = min(plan.time for plan in plans) * ALIKE
    return min((plan for plan in plans if plan.time <= longest), key=lambda plan: unevenness(plan.layout.partition))


def named_after_schedule(plan: Plan) -> Plan:
    """The plan, of a layout that recomputes nothing if its schedule has no R."""
    if plan.layout.recompute is not Recompute.PLANNED or plan.timeline.schedule.recomputes:
        return plan
    return replace(plan, layout=replace(plan.layout, recompute=Recompute.NONE))
