"""What stragglers cost: replicas wait for the slowest of their group, and groups only for those they meet."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.cli.estimate.replica_lanes import to_replica_lanes
from megatron.zero_bubble.cli.estimate.stragglers import Stragglers, scaled, simulate_replicas, time_per_step
from megatron.zero_bubble.schedule.hierarchy import Hierarchy

LEVELS = Hierarchy.parse("2:2,4:4,8:8")
STEPS = 2000


def test_synchronous_replicas_take_the_slowest_in_every_step():
    times = Stragglers(8, slowdown=5.0).times(STEPS)
    assert all(sorted(step) == [1.0] * 7 + [5.0] for step in times)
    assert len({step.index(5.0) for step in times}) == 8
    assert time_per_step(times, None) == 5.0
    assert time_per_step(times, None, 0.5) == 5.5


def test_steps_without_a_straggler():
    times = Stragglers(8, slowdown=5.0, probability=0.25).times(STEPS)
    share = sum(5.0 in step for step in times) / STEPS
    assert share == pytest.approx(0.25, abs=0.03)
    assert time_per_step(times, None) == pytest.approx(1 + 4 * share)


def test_a_fixed_straggler_costs_the_same_under_every_hierarchy():
    times = Stragglers(8, "fixed", slowdown=5.0).times(STEPS)
    assert all(step[0] == 5.0 for step in times)
    assert [time_per_step(times, levels) for levels in (None, LEVELS, Hierarchy.parse("8:8"))] == [5.0] * 3


def test_delays_of_groups_overlap_until_they_meet():
    """Two stragglers in different pairs, in different steps, delay all by as much as one of them."""
    times = [[5.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 5.0]]
    pairs = simulate_replicas(times, Hierarchy.parse("1:2,2:4"))
    assert [step.resumed for step in pairs[0]] == [5.0, 5.0, 1.0, 1.0]
    assert [step.end for step in pairs[1]] == [6.0, 6.0, 2.0, 6.0]
    assert [step.resumed for step in pairs[1]] == [6.0] * 4
    assert time_per_step(times, None) == 5.0


def test_more_levels_wait_more_and_longer_periods_less():
    times = Stragglers(8).times(STEPS)
    local, levels, longer = Hierarchy.parse("8:8"), LEVELS, Hierarchy.parse("4:2,8:4,16:8")
    assert 1.5 < time_per_step(times, local) < time_per_step(times, levels) < 5.0
    assert time_per_step(times, longer) < time_per_step(times, levels)


def test_levels_are_scaled_in_proportion():
    assert scaled(LEVELS, 16) == Hierarchy.parse("4:2,8:4,16:8")
    assert scaled(LEVELS, 4) == Hierarchy.parse("1:2,2:4,4:8")
    assert scaled(LEVELS, 2) is None


def test_the_drawing_has_every_step_of_every_replica():
    times = Stragglers(4).times(3)
    svg = to_replica_lanes({"synchronous": simulate_replicas(times, None)}, {(0, 1)}, title="four")
    assert svg.count("<title>") == 12
    assert "synchronous: 3 steps end at 15" in svg
