"""The slowdown of a schedule by durations that vary."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.expected_time import expected_time, slowdown
from megatron.zero_bubble.planner.generate import request_for, schedule_of
from megatron.zero_bubble.planner.request import PlanRequest
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


def spread_request(number: int) -> PlanRequest:
    """A random problem of four ranks with nearly equal stages, whose durations vary by a tenth or a fifth."""
    generator = random.Random(number)
    num_microbatches = generator.randint(4, 14)
    times = {name: tuple(generator.uniform(0.9, 1.2) for _ in range(4)) for name in ("time_f", "time_b", "time_w")}
    costs = replace(StageCosts.uniform(4), **times)
    request = request_for("auto", 4, num_microbatches, costs=costs, memory_limit=4 * generator.choice((1, 2)))
    return replace(request, takes_makespan=True, spread=generator.choice((0.1, 0.2)))


def test_a_plan_for_durations_that_vary_is_expected_to_take_less_time() -> None:
    gains = []
    for number in range(12):
        request = spread_request(number)
        with_spread, without = (
            expected_time(request, simulate(schedule_of(one), one.stage_costs))
            for one in (request, replace(request, spread=0.0))
        )
        gains.append(without / with_spread)
    assert min(gains) >= 1
    assert max(gains) > 1.01


def test_messages_that_occupy_ranks_are_counted_once() -> None:
    costs = StageCosts.uniform(4, time_comm=1)
    occupied = simulate(generate("1f1b", 4, 8), costs, overlap_communication=False)
    assert slowdown(occupied, 1e-9, 0) == pytest.approx(1)
