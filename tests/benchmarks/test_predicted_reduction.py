"""How much of a reduction of gradients the W's at the end of a rank hide."""

from __future__ import annotations

from fractions import Fraction

import pytest

from benchmarks.emulation.predicted_reduction import Reduction, simulate_reduction
from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.schedule import Op, Placement, Schedule, ScheduleError, StageCosts, simulate
from megatron.zero_bubble.schedule.tail import reorder_tail


def hidden(name: str, *, reordered: bool, num_buckets: int = 10) -> Fraction:
    """Share of a reduction that takes three W's, with equal F, B and W on four ranks."""
    schedule = generate(name, 4, 8)
    each = Fraction(1, schedule.num_chunks)
    costs = StageCosts.uniform(schedule.num_stages, each, each, each)
    timeline = simulate(reorder_tail(schedule) if reordered else schedule, costs)
    reduction = simulate_reduction(timeline, [3 * each] * schedule.num_stages, num_buckets, by_parameter=reordered)
    return 1 - reduction.exposed / 3


def test_the_reduction_is_hidden_behind_the_tail():
    """Parameter by parameter nine of ten buckets are hidden; in microbatch order only what the very last W covers."""
    for name in ("zb-h2", "zb-2p"):
        assert hidden(name, reordered=False) == Fraction(3, 10)
        assert hidden(name, reordered=True) == Fraction(9, 10)
    assert hidden("zb-v", reordered=True) == Fraction(19, 20)


@pytest.mark.parametrize("name", [name for name in names() if name != "optimal"])
def test_reordering_never_hides_less(name):
    assert hidden(name, reordered=True) >= hidden(name, reordered=False)


def test_a_schedule_without_a_tail_on_its_last_rank_hides_nothing_more():
    """ZB-H1's first rank computes each W right after its B, up to the end."""
    assert hidden("zb-h1", reordered=True) == hidden("zb-h1", reordered=False) == Fraction(3, 10)


def test_one_rank_and_a_link_that_is_slower_than_compute():
    costs = StageCosts.uniform(1, 1, 1, 4)
    schedule = Schedule("two", Placement("linear", 1), 2, (tuple(map(Op.parse, ["F0", "F1", "B0", "B1", "W0", "W1"])),))
    timeline = simulate(schedule, costs)
    assert timeline.makespan == 12
    # Four buckets, ready at 6, 8, 10 and 12, each 3 long.
    by_parameter = simulate_reduction(timeline, [12], 4, by_parameter=True)
    assert by_parameter == Reduction(ends=(18,), makespan=18, exposed=6)
    # Ready at 9, 10, 11 and 12.
    assert simulate_reduction(timeline, [12], 4, by_parameter=False).exposed == 9


@pytest.mark.parametrize(("times", "buckets"), [([1], 2), ([1, 1], 0)])
def test_a_reduction_that_does_not_fit_is_refused(times, buckets):
    timeline = simulate(generate("zb-h1", 2, 2), StageCosts.uniform(2))
    with pytest.raises(ScheduleError, match="needs 2 times and at least one bucket"):
        simulate_reduction(timeline, times, buckets, by_parameter=True)
