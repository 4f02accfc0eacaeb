"""How many layouts a search plans: many for small problems, few for large ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.random_models import random_request
from megatron.zero_bubble.planner import search_layouts
from megatron.zero_bubble.planner.request import EFFORT, QUICK_EFFORT, PlanRequest
from megatron.zero_bubble.planner.search_extent import extent_of, most_moves
from megatron.zero_bubble.schedule import Placement


def request(num_ranks: int, num_microbatches: int, effort: int = EFFORT) -> PlanRequest:
    return PlanRequest("auto", num_microbatches, (Placement("linear", num_ranks),), effort=effort)


def test_fewer_layouts_are_planned_in_larger_problems():
    small, medium, large = (extent_of(request(8, m)) for m in (8, 100, 200))
    assert (small.is_small, medium.is_small, large.is_small) == (True, False, False)
    assert small.rounds[0][0] > medium.rounds[0][0]
    assert len(small.rounds) == len(medium.rounds) == 2
    assert len(large.rounds) == 1
    assert small.num_moved > medium.num_moved
    assert small.worth_moving > medium.worth_moving


def test_a_quick_search_plans_the_best_layout_with_all_its_effort():
    assert extent_of(request(8, 100, QUICK_EFFORT)).rounds[-1] == (1, QUICK_EFFORT)


@pytest.mark.parametrize(("m", "moves"), [(8, 6), (200, 4), (10_000, 1)])
def test_large_problems_have_few_further_partitions_but_at_least_one(m, moves):
    assert most_moves(request(8, m), Placement("linear", 8)) == moves


def test_layers_move_in_a_layout_whose_first_plan_is_slow_for_lack_of_memory():
    """The first plan of the linear layout takes 1.3 times as long as the best plan, and after moves 0.92 times."""
    request, _ = random_request(74050, 400)
    linear = replace(request, usual=None, placements=request.placements[:1], vocabulary_parallel=False)
    assert search_layouts(request).time <= search_layouts(linear).time * (1 + 1e-9)
