"""How many layouts a search plans: many for small problems, few for large ones."""

from __future__ import annotations

import pytest

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
    assert extent_of(request(8, 100, QUICK_EFFORT)).rounds[-1] == (1, 1)


@pytest.mark.parametrize(("m", "moves"), [(8, 6), (200, 4), (10_000, 1)])
def test_large_problems_have_few_further_partitions_but_at_least_one(m, moves):
    assert most_moves(request(8, m), Placement("linear", 8)) == moves
