"""The search for partition, placement, chunks and recomputation."""

from dataclasses import replace
from itertools import product

import pytest

from megatron.zero_bubble.schedule import Infeasible, Placement
from megatron.zero_bubble.schedule.errors import ScheduleError
from megatron.zero_bubble.schedule.layouts import Layout, LayoutPlan, LayoutProblem, all_placements, search_layouts
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts, even_partition
from megatron.zero_bubble.schedule.recomputation import Recompute

LAYER = UnitCosts(1, 1, 0.8, memory_f=1, memory_b=-0.5, memory_w=-0.5, time_r=1, memory_r=0.9, state=0.5)
NAMED = ("auto", "1f1b", "zb-h1", "zb-h2")


def model(num_layers: int, head: float) -> ModelCosts:
    output = UnitCosts(head, head, head, memory_f=0.5, memory_b=-0.2, memory_w=-0.3, state=1)
    return ModelCosts(UnitCosts(0.01, 0, 0.01, state=1), (LAYER,) * num_layers, output, 0.05)


def linear_problem(num_layers: int, head: float, num_ranks: int, num_microbatches: int) -> LayoutProblem:
    """A problem with one chunk a rank, in the memory that 1F1B needs with an even split."""
    costs, placement = model(num_layers, head), Placement("linear", num_ranks)
    problem = LayoutProblem(costs, num_ranks, num_microbatches, placements=(placement,))
    even = problem.plan(Layout(placement, even_partition(num_layers, num_ranks)), "1f1b")
    return LayoutProblem(costs, num_ranks, num_microbatches, placements=(placement,), capacity=even.memory)


@pytest.mark.parametrize("head", [2, 5.7])
def test_no_split_under_any_named_schedule_is_faster(head: float) -> None:
    problem = linear_problem(16, head, 4, 16)
    found = search_layouts(problem)[0]
    times = []
    for partition in product(range(17), repeat=3):
        last = 16 - sum(partition)
        if last < 0 or not all(partition[1:]):
            continue
        layout = Layout(problem.placements[0], (*partition, last))
        work = max(problem.model.of_stages(layout.partition, layout.placement).work(stage) for stage in range(4))
        if 16 * work < found.time:
            times += [plan.time for plan in _plans(problem, layout)]
    assert times
    assert found.time <= min(times) * (1 + 1e-9)


def _plans(problem: LayoutProblem, layout: Layout) -> list[LayoutPlan]:
    plans = []
    for name in NAMED:
        try:
            plans.append(problem.plan(layout, name))
        except Infeasible:
            continue
    return plans


@pytest.mark.parametrize(("head", "at_least"), [(2, 1.15), (5.7, 1.55)])
def test_a_heavy_output_is_made_up_for_by_fewer_layers(head: float, at_least: float) -> None:
    problem = linear_problem(32, head, 8, 32)
    even = problem.plan(Layout(problem.placements[0], (4,) * 8))
    found = search_layouts(problem)[0]
    assert even.time / found.time >= at_least
    assert problem.capacity is not None
    assert found.memory <= problem.capacity * (1 + 1e-9)


def test_what_is_fixed_stays_fixed() -> None:
    problem = LayoutProblem(model(8, 1), 2, 8, placements=all_placements(2)[:1], partition=(3, 5))
    assert [plan.layout for plan in search_layouts(problem)] == [Layout(Placement("linear", 2), (3, 5))]


def test_a_model_of_equal_stages_stays_even_and_linear() -> None:
    problem = LayoutProblem(model(8, 0.05), 2, 32, placements=all_placements(2))
    assert search_layouts(problem)[0].layout == Layout(Placement("linear", 2), (4, 4))


def test_several_chunks_are_chosen_where_they_are_faster() -> None:
    problem = LayoutProblem(model(16, 0.05), 4, 8, placements=all_placements(4), activations=16)
    plans = search_layouts(problem)
    assert plans[0].layout.placement.num_chunks > 1
    assert plans[0].time <= min(plan.time for plan in plans) * 1.01


def test_what_has_no_room_is_recomputed() -> None:
    placements = all_placements(4)[:1]
    tight = LayoutProblem(
        model(16, 0.05), 4, 8, placements=placements, recomputes=(Recompute.NONE, Recompute.PLANNED), activations=6
    )
    assert search_layouts(tight)[0].layout.recompute is Recompute.PLANNED


def test_a_model_that_fits_nowhere_is_refused_with_the_reason() -> None:
    problem = LayoutProblem(model(8, 1), 2, 8, placements=all_placements(2)[:1], capacity=2)
    with pytest.raises(Infeasible, match=r"optimizer states need 3\.5 of the 2 of a rank"):
        search_layouts(problem)


def test_fewer_layers_than_stages_leave_that_placement_out() -> None:
    problem = LayoutProblem(model(4, 1), 4, 8, placements=all_placements(4))
    assert {plan.layout.placement.num_stages for plan in search_layouts(problem)} == {4}


def test_more_ranks_than_layers_are_refused() -> None:
    with pytest.raises(ScheduleError, match="2 layers are not enough for 5 stages"):
        search_layouts(LayoutProblem(model(2, 1), 5, 8, placements=all_placements(5)[:1]))


# The lighter output takes as many seconds of searching.
@pytest.mark.parametrize(("head", "gain"), [pytest.param(2, 1.1, marks=pytest.mark.exhaustive), (5.7, 1.25)])
def test_a_heavy_vocabulary_is_spread_where_that_is_faster(head: float, gain: float) -> None:
    """Eight ranks, 32 layers: the best layout with shards against the best of whole layers, in any placement."""
    problem = LayoutProblem(model(32, head), 8, 32, placements=all_placements(8))
    whole, chosen = search_layouts(problem)[0], search_layouts(replace(problem, vocabulary_parallel=None))[0]
    assert not whole.layout.vocabulary_parallel
    assert chosen.layout.vocabulary_parallel
    assert whole.time / chosen.time > gain
    assert max(chosen.states) - min(chosen.states) <= LAYER.state
    forced = search_layouts(replace(problem, vocabulary_parallel=True))
    assert all(plan.layout.vocabulary_parallel for plan in forced)
    assert forced[0].time <= chosen.time * (1 + 1e-9)


def test_a_light_vocabulary_stays_on_its_stages() -> None:
    problem = LayoutProblem(model(32, 0.05), 4, 32, placements=all_placements(4), vocabulary_parallel=None)
    assert not search_layouts(problem)[0].layout.vocabulary_parallel
