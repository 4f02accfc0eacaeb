"""The order of a step's microbatches: never slower than the data's, within the limits, and the same each time."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.microbatch_order import WORTHWHILE, like_order, order_microbatches
from megatron.zero_bubble.schedule import Infeasible, Schedule, StageCosts, lower, simulate


def costs_of(lengths: list[float], num_stages: int) -> list[StageCosts]:
    return [
        StageCosts.uniform(num_stages, length, length, length, 0.1, length, -length / 2, -length / 2)
        for length in lengths
    ]


def planned(name: str, p: int, m: int, chunks: int = 1) -> Schedule:
    return generate(name, p, m, costs=StageCosts.uniform(chunks * p, time_comm=0.1))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("zb-2p", 1), ("auto", 1), ("zb-v", 2)])
@pytest.mark.parametrize("overlap", [True, False])
def test_times_of_equal_microbatches_are_those_of_the_simulation(name: str, chunks: int, overlap: bool):
    schedule, costs = planned(name, 3, 5, chunks), costs_of([1.0], 3 * chunks)[0]
    timeline = simulate(schedule, costs, overlap_communication=overlap)
    for interlocks, expected in ((False, timeline.makespan), (True, timeline.cost)):
        order = order_microbatches(schedule, [costs] * 5, interlocks=interlocks, overlap_communication=overlap)
        assert order.places == (0, 1, 2, 3, 4)
        assert order.time == order.time_in_data_order == pytest.approx(expected)


def test_a_long_microbatch_goes_where_all_ranks_have_work():
    """Neither first, when other ranks wait for it, nor last."""
    order = order_microbatches(planned("zb-h1", 3, 9), costs_of([8.0] + [1.0] * 8, 3))
    assert 0 < order.places.index(0) < 8
    assert order.time < order.time_in_data_order * 0.95


def test_an_earlier_order_is_taken_over_by_size():
    assert like_order((2, 0, 1), (30, 10, 20), (5, 7, 6)) == (2, 1, 0)
    assert like_order((1, 2, 0), (9, 9, 9), (4, 4, 4)) == (1, 2, 0)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 7))
def test_no_order_is_slower_than_the_data_s(data: st.DataObject, p: int, m: int):
    lengths = data.draw(st.lists(st.floats(0.1, 10), min_size=m, max_size=m))
    order = order_microbatches(planned("auto", p, m), costs_of(lengths, p))
    assert sorted(order.places) == list(range(m))
    assert order.time <= order.time_in_data_order
    if order.places != tuple(range(m)):
        assert order.time <= order.time_in_data_order * (1 - WORTHWHILE)


@pytest.mark.parametrize("lengths", [[1, 6, 2, 1, 3], [4, 1, 1, 9, 1], [2, 2, 5, 1, 7]])
def test_few_microbatches_have_nearly_the_best_of_all_orders(lengths: list[float]):
    schedule, costs = planned("zb-2p", 3, 5), costs_of(lengths, 3)
    best = min(
        order_microbatches(schedule, [costs[number] for number in places], num_tried=1).time
        for places in permutations(range(5))
    )
    assert order_microbatches(schedule, costs).time <= best * 1.03


def test_the_same_step_has_the_same_order():
    schedule, costs = planned("auto", 4, 8), costs_of([3, 1, 4, 1, 5, 9, 2, 6], 4)
    assert order_microbatches(schedule, costs) == order_microbatches(lower(schedule), costs)


def test_operations_that_recompute_or_fuse_gradients_count():
    """With R, and with a backward that makes both gradients, times are those of the simulation."""
    costs = replace(costs_of([1.0], 3)[0], time_r=(1.0,) * 3, memory_r=(0.5,) * 3)
    for recompute in ("none", "full"):
        schedule = generate("1f1b", 3, 4, costs=costs, recompute=recompute)
        expected = simulate(schedule, costs).makespan
        assert order_microbatches(schedule, [costs] * 4).time == pytest.approx(expected)


def test_a_fused_backward_saves_its_time():
    costs = replace(costs_of([1.0], 3)[0], saved_bw=(0.5,) * 3)
    schedule = generate("1f1b", 3, 4, costs=costs)
    order = order_microbatches(schedule, [costs] * 4)
    assert order.time == pytest.approx(simulate(schedule, costs).makespan)


def test_a_microbatch_takes_the_memory_of_b_only_while_b_and_w_run():
    costs = replace(costs_of([1.0], 2)[0], memory_b=(0.2,) * 2, memory_w=(-1.2,) * 2)
    for name in ("1f1b", "zb-h1"):
        schedule = generate(name, 2, 4, costs=costs)
        peaks = simulate(schedule, costs).peak_memory
        assert order_microbatches(schedule, [costs] * 4, limits=peaks).places == (0, 1, 2, 3)
        with pytest.raises(Infeasible):
            order_microbatches(schedule, [costs] * 4, limits=[peak * 0.99 for peak in peaks])


class TestLimits:
    """Two ranks hold two microbatches at once."""

    schedule = planned("zb-h1", 2, 4)
    costs = costs_of([4.0, 4.0, 1.0, 1.0], 2)

    def test_an_order_is_taken_that_fits(self):
        order = order_microbatches(self.schedule, self.costs, limits=(5.0, 5.0))
        first, second, third, last = (number < 2 for number in order.places)
        assert (first, third) != (True, True) or not second  # two long ones never follow each other
        assert first is not second
        assert second is not third or third is not last

    def test_a_step_that_fits_in_no_order_names_its_largest_microbatch(self):
        with pytest.raises(
            Infeasible,
            match=r"need 8 of memory on rank 0, above the limit of 4; the largest, microbatch 0, keeps 4 alone$",
        ):
            order_microbatches(self.schedule, self.costs, limits=(4.0, 4.0))

    def test_what_operations_need_while_they_run_counts(self):
        """A long microbatch and a short one have room for 1 more, two short ones for 4 more."""
        inside = [[1.0] * 2] * 2 + [[4.0] * 2] * 2
        order_microbatches(self.schedule, self.costs, limits=(9.0, 9.0), inside=inside)
        with pytest.raises(Infeasible, match="need 9 of memory on rank 0, above the limit of 6"):
            order_microbatches(self.schedule, self.costs, limits=(6.0, 6.0), inside=inside)

    def test_without_limits_any_order_may_be_taken(self):
        assert (
            order_microbatches(self.schedule, self.costs).time
            <= order_microbatches(self.schedule, self.costs, limits=(5.0, 5.0)).time
        )
