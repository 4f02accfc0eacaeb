"""The slowdown of a schedule by durations that vary."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.expected_time import slowdown
from megatron.zero_bubble.schedule import StageCosts, simulate


def timeline(name: str, num_ranks: int = 4, num_microbatches: int = 8, **options):
    schedule = generate(name, num_ranks, num_microbatches, **options)
    return simulate(schedule, StageCosts.uniform(schedule.num_stages))


def test_equal_durations_cost_nothing() -> None:
    assert slowdown(timeline("zb-h1"), 0, 0) == 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-2p", "zb-v", "interleaved-zb"])
def test_the_more_durations_vary_the_longer_a_schedule_takes(name: str) -> None:
    few, many = (slowdown(timeline(name), spread, 0) for spread in (0.05, 0.3))
    assert 1 < few < many


def test_time_between_operations_costs_most_where_there_are_most() -> None:
    """Twice as many operations of half the length: the time between two of them counts twice as often."""
    one, two = (slowdown(timeline(name), 0, 0.1) for name in ("zb-2p", "zb-v"))
    assert one == pytest.approx(1.1, abs=0.02)
    assert two == pytest.approx(1.1, abs=0.02)
    halved = simulate(generate("zb-v", 4, 8), StageCosts.uniform(8, 0.5, 0.5, 0.5))
    assert slowdown(halved, 0, 0.1) == pytest.approx(1.2, abs=0.03)


def test_an_order_without_slack_loses_more_than_one_with_some() -> None:
    assert slowdown(timeline("zb-v"), 0.2, 0) > slowdown(timeline("1f1b"), 0.2, 0)


def test_a_result_depends_on_nothing_but_its_arguments() -> None:
    assert slowdown(timeline("zb-v"), 0.2, 0.1) == slowdown(timeline("zb-v"), 0.2, 0.1)
