"""The memory that a layout leaves to activations."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner import PlanRequest, all_placements
from megatron.zero_bubble.planner.layout_plan import limits_of
from megatron.zero_bubble.schedule import Infeasible

STATES = (2.0, 8.0)


@pytest.mark.parametrize(
    ("capacity", "limit", "left"),
    [(None, None, None), (None, 3, (3, 3)), (10, None, (8, 2)), (10, 3, (3, 2)), (10, (9, 1), (8, 1))],
)
def test_activations_get_what_both_limits_allow(
    capacity: float | None, limit: float | tuple[float, ...] | None, left: tuple[float, ...] | None
) -> None:
    request = PlanRequest("auto", 4, all_placements(2), capacity=capacity, memory_limit=limit)
    assert limits_of(request, STATES, request.capacity) == left


def test_states_without_room_are_refused() -> None:
    request = PlanRequest("auto", 4, all_placements(2), capacity=8)
    with pytest.raises(Infeasible, match="parameters, gradients and optimizer states need 8 of the 8 of a rank"):
        limits_of(request, STATES, request.capacity)
