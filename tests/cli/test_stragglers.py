"""The cost of stragglers: replicas wait for the slowest of their group, and groups only when they average."""

from __future__ import annotations

import json

import pytest

from megatron.zero_bubble.cli.estimate.replica_lanes import to_replica_lanes
from megatron.zero_bubble.cli.estimate.stragglers import ReplicasFlags, simulate_replicas, time_per_step
from megatron.zero_bubble.cli.estimate_command import main
from megatron.zero_bubble.cli.invocation import read_flags
from megatron.zero_bubble.schedule.hierarchy import Hierarchy

LEVELS = Hierarchy.parse("2:2,4:4,8:8")
STEPS = 2000


def times_of(*flags: str, steps: int = STEPS) -> list[list[float]]:
    return read_flags(ReplicasFlags, flags, "test", "").draw_times(steps)


def test_synchronous_replicas_take_the_slowest_in_every_step():
    times = times_of()
    assert all(sorted(step) == [1.0] * 7 + [5.0] for step in times)
    assert len({step.index(5.0) for step in times}) == 8
    assert time_per_step(times, None) == 5.0


def test_steps_without_a_straggler():
    times = times_of("--probability", "0.25")
    share = sum(5.0 in step for step in times) / STEPS
    assert share == pytest.approx(0.25, abs=0.03)
    assert time_per_step(times, None) == pytest.approx(1 + 4 * share)


def test_a_fixed_straggler_costs_the_same_under_every_hierarchy():
    times = times_of("--straggler", "fixed")
    assert all(step[0] == 5.0 for step in times)
    assert [time_per_step(times, levels) for levels in (None, LEVELS, Hierarchy.parse("8:8"))] == [5.0] * 3


def test_delays_of_groups_overlap_until_they_meet():
    """Two stragglers in different pairs, in different steps, delay all by as much as one of them."""
    times = [[5.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 5.0]]
    pairs = simulate_replicas(times, Hierarchy.parse("1:2,2:4"))
    assert [step.resumed for step in pairs[0]] == [5.0, 5.0, 1.0, 1.0]
    assert [step.end for step in pairs[1]] == [6.0, 6.0, 2.0, 6.0]
    assert [step.resumed for step in pairs[1]] == [6.0] * 4
    assert [step.straggles for step in pairs[1]] == [False, False, False, True]
    assert time_per_step(times, None) == 5.0


def test_more_levels_wait_more_and_longer_periods_less():
    times = times_of()
    local, longer = Hierarchy.parse("8:8"), Hierarchy.parse("4:2,8:4,16:8")
    assert 1.5 < time_per_step(times, local) < time_per_step(times, LEVELS) < 5.0
    assert time_per_step(times, longer) < time_per_step(times, LEVELS)


def test_the_drawing_has_every_step_of_every_replica():
    times = times_of("--num-replicas", "4", "--hierarchical-sgd", "4:4", steps=3)
    svg = to_replica_lanes({"synchronous": simulate_replicas(times, None)}, title="four")
    assert svg.count("<title>") == 12
    assert "synchronous: 3 steps end at 15" in svg


def test_the_command_prints_the_numbers_of_the_documentation_and_draws(tmp_path, capsys):
    timeline = tmp_path / "timeline.svg"
    assert main(["stragglers", "--seed", "1", "--timeline", str(timeline)]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split("  ")[0] == "SGD"
    assert [row.split() for row in rows] == [
        ["synchronous", "-", "5", "1.00"],
        ["local", "8:8", "2.312", "2.16"],
        ["hierarchical", "2:2,4:4,8:8", "2.767", "1.81"],
    ]
    assert "hierarchical SGD 2:2,4:4,8:8: 4 steps end at" in timeline.read_text()


def test_json_has_the_mean_step_of_each_method(capsys):
    assert main(["stragglers", "--straggler", "fixed", "--slowdown", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"synchronous": 2, "local": 2, "hierarchical": 2}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--num-replicas", "16"],
            "argument --hierarchical-sgd: ends with groups of 8, and --num-replicas is 16: the last group must be all "
            "replicas",
        ),
        (
            ["--hierarchical-sgd", "4:4,2:8"],
            "argument --hierarchical-sgd: 4:4,2:8: period 2 comes after 4: periods must increase with the groups",
        ),
        (["--slowdown", "2,3"], "argument --slowdown: expected one number, got '2,3'"),
        (["--slowdown", "0.5"], "argument --slowdown: must not be below 1, got 0.5"),
        (["--probability", "1.5"], "argument --probability: must not be above 1, got 1.5"),
        (["--num-replicas", "1"], "argument --num-replicas: must be at least 2, got 1"),
        (["--num-replicas", "4097"], "argument --num-replicas: must be at most 4096, got 4097"),
        (["--timeline", "steps.png"], "argument --timeline: steps.png must end in .svg"),
        (["--timeline", "/none/steps.svg"], "argument --timeline: /none is not a folder"),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert main(["stragglers", *flags]) == 2
    assert capsys.readouterr().err == f"zero-bubble estimate: error: {message}\n"
