"""The memory that a layout leaves to activations, and the capacity that a refused layout needs."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from megatron.zero_bubble.planner import Layout, PlanRequest, all_placements, search_layouts
from megatron.zero_bubble.planner.layout_plan import limits_of, plan_layout
from megatron.zero_bubble.schedule import Infeasible, Placement, ScheduleError
from megatron.zero_bubble.schedule.costs import SMALLEST
from megatron.zero_bubble.schedule.model_costs import NOTHING, ModelCosts, UnitCosts
from megatron.zero_bubble.schedule.recomputation import Recompute

STATES = (2.0, 8.0)


@pytest.mark.parametrize(
    ("capacity", "limit", "left"),
    [
        (None, None, None),
        (None, 3, (3, 3)),
        (10, None, (8, 2)),
        (10, 3, (3, 2)),
        (10, (9, 1), (8, 1)),
        (8, None, (6, SMALLEST)),
    ],
)
def test_activations_get_what_both_limits_allow(
    capacity: float | None, limit: float | tuple[float, ...] | None, left: tuple[float, ...] | None
) -> None:
    request = PlanRequest("auto", 4, all_placements(2), capacity=capacity, memory_limit=limit)
    assert limits_of(request, STATES, request.capacity) == left


def test_states_without_room_are_refused() -> None:
    request = PlanRequest("auto", 4, all_placements(2), capacity=7)
    with pytest.raises(Infeasible, match="parameters, gradients and optimizer states need 8 of the 7 of a rank"):
        limits_of(request, STATES, request.capacity)


def _model(layers: int, *, embedding_state: float = 0.0, **of_a_layer: float) -> ModelCosts:
    layer = UnitCosts(time_f=1, time_b=1, time_w=1, **of_a_layer)
    return ModelCosts(UnitCosts(0, 0, 0, state=embedding_state), (layer,) * layers, NOTHING)


def _refused(model: ModelCosts, capacity: float, recompute: Recompute) -> Infeasible:
    layout = Layout(Placement("linear", 2), (len(model.layers) // 2,) * 2, recompute)
    request = PlanRequest("auto", 6, (layout.placement,), costs=model, capacity=capacity, recomputes=(recompute,))
    with pytest.raises(Infeasible) as refusal:
        plan_layout(request, layout)
    assert f"{refusal.value.smallest_limit:g} is enough for every rank" in str(refusal.value)
    plan_layout(replace(request, capacity=refusal.value.smallest_limit), layout)
    return refusal.value


def test_layers_without_activations_are_refused_for_their_states() -> None:
    assert _refused(_model(4, state=10), 5, Recompute.NONE).smallest_limit == 20


def test_the_states_of_one_rank_are_not_added_to_the_activations_of_another() -> None:
    """The first rank has 102 of states and activations of 10 and 10; the second has 2 of states, and 40 and 40."""
    model = _model(4, embedding_state=100, state=1, memory_f=10, memory_b=0, memory_w=-10)
    first, second, *others = model.layers
    larger = tuple(replace(layer, memory_f=40, memory_w=-40) for layer in others)
    assert _refused(replace(model, layers=(first, second, *larger)), 50, Recompute.NONE).smallest_limit == 122


def test_the_smallest_capacity_recomputes_in_as_many_groups_as_there_are_blocks() -> None:
    """Also on the rank with little state, which has room for fewer groups in the capacity that is refused."""
    sizes = {"memory_f": 16, "memory_b": -8, "memory_w": -8, "memory_r": 15, "num_blocks": 1, "time_r": 1}
    model = _model(16, embedding_state=400, state=1, **sizes)
    assert _refused(model, 300, Recompute.FULL).smallest_limit < 500


@pytest.mark.parametrize("partition", [(), (4,), (1, 1, 1, 1)])
def test_a_partition_for_other_stages_is_refused(partition: tuple[int, ...]) -> None:
    layout = Layout(Placement("linear", 2), partition)
    request = PlanRequest("auto", 6, (layout.placement,), costs=_model(4), partition=partition)
    for plan in (lambda: plan_layout(request, layout), lambda: search_layouts(request)):
        with pytest.raises(ScheduleError, match="stages, but the placement has 2"):
            plan()


def test_a_layer_that_does_not_fit_beside_others_gets_a_partition_that_fits() -> None:
    """Neither equal numbers of layers nor equal work fit in the limit."""
    model = _model(6, memory_f=1, memory_w=-1)
    first, *others = model.layers
    model = replace(model, layers=(replace(first, memory_f=5, memory_w=-5), *others))
    request = PlanRequest("auto", 6, (Placement("linear", 2),), costs=model, memory_limit=6, effort=0)
    assert search_layouts(request).layout.partition == (2, 4)


def test_recomputation_is_tried_in_more_combinations_while_none_fits() -> None:
    """The first three combinations with recomputation need 10 and more."""
    sizes = ((4, 3), (4, 3), (6, 5), (4, 3))
    layers = tuple(UnitCosts(1, 1, 1, held, 0, -held, 1, restored, 1, state=1) for held, restored in sizes)
    model = ModelCosts(NOTHING, layers, UnitCosts(2, 2, 2, 4, 0, -4))
    options = {"recomputes": (Recompute.NONE, Recompute.PLANNED), "vocabulary_parallel": None, "effort": 0}
    assert search_layouts(PlanRequest("auto", 4, all_placements(2, 4), model, capacity=9.67, **options)).memory < 9.67


def test_an_output_layer_that_takes_no_time_is_sharded_like_any_other() -> None:
    """Without an S, the embedding of 6 would cost nothing on shards."""
    model = replace(_model(8), embedding=UnitCosts(3, 0, 3), output=NOTHING)
    layout = Layout(Placement("linear", 2), (4, 4), vocabulary_parallel=True)
    request = PlanRequest("auto", 8, (layout.placement,), costs=model, vocabulary_parallel=None, effort=0)
    sharded = plan_layout(request, layout)
    assert sharded.timeline.schedule.is_vocabulary_parallel
    assert sharded.time >= 8 * (4 * 3 + 6 / 2)
    chosen = search_layouts(request)
    assert chosen.layout.vocabulary_parallel is chosen.timeline.schedule.is_vocabulary_parallel


def test_layers_without_w_are_recomputed_in_groups() -> None:
    layer = UnitCosts(1, 1, 0, memory_f=1, memory_b=-1, time_r=1, memory_r=0.9, num_blocks=1)
    model = ModelCosts(NOTHING, (layer,) * 8, NOTHING)
    layout = Layout(Placement("linear", 2), (4, 4), Recompute.PLANNED)
    request = PlanRequest("auto", 4, (layout.placement,), model, recomputes=(Recompute.PLANNED,), memory_limit=2)
    assert max(plan_layout(request, layout).timeline.schedule.groups) > 1


@pytest.mark.parametrize("name", ["time_f", "time_b", "time_w"])
def test_costs_that_are_not_numbers_are_refused(name: str) -> None:
    model = replace(_model(4), embedding=replace(NOTHING, **{name: nan}))
    with pytest.raises(ScheduleError, match=f"{name} must be finite numbers, got nan"):
        search_layouts(PlanRequest("auto", 4, (Placement("linear", 2),), costs=model))


def test_a_capacity_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(Infeasible, match="more than the nan of a rank"):
        search_layouts(PlanRequest("auto", 4, all_placements(2), costs=_model(4), capacity=nan))
