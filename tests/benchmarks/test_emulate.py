"""The benchmark of schedules with emulated compute: what it prints, never how fast it was.

`make test` runs one emulation; `make test-all` also the other modes, whose parts have tests here
that start no ranks.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.emulate import main
from benchmarks.emulation.emulated_results import Result
from benchmarks.emulation.iterations import IterationResult, iteration_table
from benchmarks.emulation.link import EmulatedLink
from benchmarks.emulation.sleeping import Emulation, await_arrival
from benchmarks.emulation.worker import StepRecord
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import Placement, StageCosts, simulate, with_post_validation
from megatron.zero_bubble.schedule.formats import profile_from_json
from tests.mistakes import one_line_mistake
from tests.runtime.in_memory import InMemoryNetwork

ROOT = Path(__file__).parents[2]

SIZE = ("--pipeline-size", "2", "--num-microbatches", "4")
QUICK = (*SIZE, "--time-f", "2", "--time-b", "2", "--time-w", "1", "--steps", "2", "--activation-bytes", "1024")


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.emulate", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.exhaustive
def test_all_schedules_and_all_peers_as_json(tmp_path):
    names = ("1f1b", "interleaved-zb", "zb-h2")
    flags = [word for name in names for word in ("--schedule", name)]
    output = tmp_path / "figures.json"
    result = run(*QUICK, *flags, "--peers", "--json", "--output", str(output))
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    figures = json.loads(output.read_text())
    assert [one["schedule"] for one in figures[: len(names)]] == list(names)
    assert {one["schedule"] for one in figures[len(names) :]} == {
        *("torch GPipe", "torch 1F1B", "torch Interleaved1F1B", "torch InterleavedZeroBubble"),
        *("torch ZBVZeroBubble", "torch DualPipeV"),
    }
    for one in figures:
        assert (one["pipeline_size"], one["num_microbatches"], len(one["steps_ms"])) == (2, 4, 2)
        assert one["ideal_ms"] == pytest.approx(20)
        assert one["simulated_ms"] >= 20
        assert min(one["steps_ms"]) <= one["measured_ms"] <= max(one["steps_ms"])
        assert 0 <= one["simulated_bubble_rate"] < 1
        assert one["ideal_ms"] <= one["span_ms"] <= max(one["steps_ms"])
        assert 0 < one["bubble_rate"] < 1
        # Sleeps are never too short. (torch puts the B of its first stage off until W, which no simulation knows.)
        bound = one["simulated_ms"] if one["schedule"] in names else one["ideal_ms"]
        assert all(math.isfinite(step) and step >= bound for step in one["steps_ms"])
        if one["schedule"] in names:
            assert 0 <= one["exposed_communication_ms"] < one["measured_ms"]
        else:
            assert one["exposed_communication_ms"] is None


@pytest.mark.exhaustive  # test_planned_run.py writes a profile, test_timeline_files.py timelines
def test_a_run_leaves_a_profile_and_timelines(tmp_path):
    """The prediction from the profile lies above that from the asked times: no sleep is too short."""
    profile, folder = tmp_path / "profile.json", tmp_path / "timeline"
    flags = ("--schedule", "zb-v", "--time-comm", "1", "--profile-output", str(profile), "--timeline", str(folder))
    result = run(*QUICK, *flags, "--json")
    assert result.returncode == 0, result.stderr
    [figures] = json.loads(result.stdout)
    found = profile_from_json(profile.read_text())
    assert found.placement == Placement("v", 2, 2)
    assert all(time >= 1 for time in (*found.costs.time_f, *found.costs.time_b))
    assert all(time >= 0.5 for time in found.costs.time_w)
    ends = [found.costs.time_comm[edge] >= 1 for edge in (0, 2)]
    assert (ends, found.costs.time_comm[1]) == ([True, True], 0), "the turn of the V needs no message"
    command = [sys.executable, "-m", "megatron.zero_bubble.cli", "schedule", "simulate", "--schedule", "zb-v", *SIZE]
    predicted = subprocess.run(
        [*command, "--costs", str(profile), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(predicted.stdout)["makespan"] > figures["simulated_ms"]
    assert len(list(folder.glob("zb-v.*"))) == 6
    trace = json.loads((folder / "zb-v.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == 2 * 2 * 3 * 4


@pytest.mark.exhaustive
def test_recomputation_is_measured_apart_and_in_b_and_the_ranks_count_what_they_hold():
    result = run(*QUICK, "--time-r", "2", "--schedule", "zb-h1", "--recompute", "full", "--json")
    assert result.returncode == 0, result.stderr
    apart, inside = json.loads(result.stdout)
    assert [one["schedule"] for one in (apart, inside)] == ["zb-h1", "zb-h1, R in B"]
    assert apart["simulated_ms"] < inside["simulated_ms"]
    for one in (apart, inside):
        assert one["peak_memory"] == pytest.approx(one["simulated_peak_memory"])
        assert min(one["steps_ms"]) >= one["simulated_ms"]


@pytest.mark.exhaustive
def test_a_table_with_slow_messages_and_a_peer_that_refuses():
    result = run(*QUICK[:3], "3", *QUICK[4:], "--schedule", "zb-h1", "--time-comm", "1", "--peers", "--markdown")
    assert result.returncode == 0, result.stderr
    assert "torch DualPipeV left out" in result.stderr
    head, _, *rows = [line.strip("| ").split("|") for line in result.stdout.splitlines()]
    assert [cell.strip() for cell in head][:3] == ["schedule", "chunks", "measured (ms)"]
    assert [row[0].strip() for row in rows][:3] == ["zb-h1", "torch GPipe", "torch 1F1B"]
    assert "torch DualPipeV" not in result.stdout


@pytest.mark.exhaustive
def test_replicas_reduce_their_gradients_with_the_tail_in_both_orders():
    flags = ("--schedule", "zb-2p", "--data-parallel-size", "2", "--time-reduce", "4", "--buckets", "4", "--json")
    result = run(*QUICK, *flags)
    assert result.returncode == 0, result.stderr
    in_order, by_parameter = json.loads(result.stdout)
    assert [one["schedule"] for one in (in_order, by_parameter)] == ["zb-2p", "zb-2p, tail by parameter"]
    # The link is busy with one bucket at least when the last gradient is there.
    assert min(one["exposed_reduction_ms"] for one in (in_order, by_parameter)) >= 1
    assert by_parameter["simulated_exposed_reduction_ms"] < in_order["simulated_exposed_reduction_ms"]
    for one in (in_order, by_parameter):
        assert min(one["steps_ms"]) >= one["simulated_ms"] - 1e-6


@pytest.mark.exhaustive
def test_post_validation_is_measured_beside_iterations_that_wait_for_the_optimizer(tmp_path):
    result = run(*QUICK, "--time-w", "2", "--schedule", "1f1b", "--schedule", "zb-h2", "--post-validation", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert [(one["schedule"], one["post_validation"]) for one in figures] == [
        *(("1f1b", False), ("1f1b", True)),
        *(("zb-h2", False), ("zb-h2", True)),
    ]
    assert [one["simulated_ms"] for one in figures] == [30, 30, 26, 24]
    for one in figures:
        assert len(one["steps_ms"]) == 2
        # Every rank works for 24 ms, and sleeps are never too short.
        assert one["measured_ms"] >= 24
        assert one["optimizer_reduction_ms"] > 0
        assert one["exposed_communication_ms"] >= 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*SIZE, "--time-reduce", "5"), "--time-reduce: give it together with a --data-parallel-size of at least 2"),
        ((*SIZE, "--data-parallel-size", "2"), "of at least 2, or neither"),
        (
            (*SIZE, "--data-parallel-size", "2", "--time-reduce", "5", "--peers"),
            "--peers: not allowed with --time-reduce",
        ),
        ((*SIZE, "--schedule", "zb-h9"), "schedule 'zb-h9' is unknown"),
        ((*SIZE, "--steps", "0"), "--steps: must be at least 1"),
        ((*SIZE, "--activation-bytes", "0"), "--activation-bytes: must be at least 16"),
        ((*SIZE, "--time-f", "0"), "--time-f: must be above 0"),
        ((*SIZE, "--time-w", "1,2,3"), "--time-w: expected 1 number or 2, got 3"),
        ((*SIZE, "--no-overlap-communication"), "messages always overlap"),
        ((*SIZE, "--costs", "nowhere.json", "--time-f", "1"), "not allowed with --costs"),
        ((*SIZE, "--costs", "nowhere.json"), "nowhere.json"),
        ((*SIZE, "--schedule", "zb-h2", "--memory-limit", "1"), "above the limit"),
        ((*SIZE, "--post-validation", "--peers"), "--peers: not allowed with --post-validation"),
        (
            (*SIZE, "--post-validation", "--data-parallel-size", "2", "--time-reduce", "5"),
            "--time-reduce: not allowed with --post-validation",
        ),
        (("--pipeline-size", "2"), "--num-microbatches"),
        ((*SIZE, "--profile-output", "profile.json"), "--profile-output: give exactly one --schedule"),
    ],
)
def test_a_mistake_is_one_line(flags, words, capsys):
    line = one_line_mistake(main, flags, capsys)
    assert line.startswith("benchmarks.emulate: error: ")
    assert words in line


def test_a_step_lasts_from_the_common_start_to_the_last_return():
    schedule = generate("zb-h1", 2, 4)
    timeline = simulate(schedule, StageCosts.uniform(2, 100, 100, 100))
    steps = [
        [
            StepRecord("zb-h1", start=10, first_start=10.1, last_end=11.6, returned=11.7, busy=1, exposed=0.01),
            StepRecord("zb-h1", start=10, first_start=10.2, last_end=11.5, returned=11.8 + late, busy=1, exposed=0.02),
        ]
        for late in (0.0, 5.0, 0.1)
    ]
    result = Result("zb-h1", timeline, steps)
    assert result.makespans == pytest.approx([1800, 6800, 1900])
    assert result.measured == pytest.approx(1900)
    assert result.ideal == 1200
    assert result.spans == pytest.approx([1500] * 3)
    assert result.idle.bubble == result.idle.total == pytest.approx(1 - 1.2 / 1.5)
    assert result.exposed == pytest.approx(20)


def iterations(timeline, ends, *, post_validation):
    """Two ranks: the second one ends its iterations at `ends`, the first one half a second before."""
    steps = [
        [
            StepRecord("x", start=0, first_start=0, last_end=0, returned=end - early, busy=1, exposed=0)
            for early in (0.5, 0)
        ]
        for end in ends
    ]
    return IterationResult("zb-h2", timeline, steps, post_validation=post_validation, optimizer_reduction=200)


def test_an_iteration_lasts_from_one_end_of_the_last_rank_to_the_next_once_the_pipeline_is_full():
    costs = StageCosts.uniform(2, 100, 100, 100)
    plain = generate("zb-h2", 2, 4, costs=costs)
    validated = with_post_validation(plain, costs)
    filled = (5, 8, 9.2, 10.4, 11.6, 12.8, 14)
    with_it = iterations(simulate(validated, costs), (*filled, *(20 + end for end in filled)), post_validation=True)
    assert with_it.makespans == pytest.approx([1200, 1200])
    assert (with_it.simulated, with_it.expected) == (1200, 1200)
    without = iterations(simulate(plain, costs), [1.5 * k for k in range(7)], post_validation=False)
    assert without.measured == 1500
    assert (without.simulated, without.expected) == (1300, 1500)
    _, row = (line.split() for line in iteration_table([without, with_it]).splitlines())
    assert row == [
        *("zb-h2", "1200.0", "0.0", "1200.0", "+0.0%"),
        *("1500.0", "0.0", "1300.0", "200.0", "+0.0%", "+25.0%", "+8.3%"),
    ]


def test_a_message_is_held_back_until_its_time():
    network = InMemoryNetwork(2)
    emulation = Emulation(activation_bytes=64)
    assert emulation.spec.shape == (1, 8)
    (message,) = emulation.compute(1, 20)
    sent = float(message[0, 0])
    network.put(1, 0, message)
    link = EmulatedLink(network.communicator(0))
    begin = time.perf_counter()
    arrived = link.receive(1, emulation.spec).wait()
    end = time.perf_counter()
    assert torch.equal(arrived[0, :2], message[0, :2])
    assert end >= sent + 0.02
    assert await_arrival(message) == sent
    assert 0 <= link.exposed <= end - begin


def test_emulated_compute_remembers_its_span():
    emulation = Emulation(activation_bytes=16)
    emulation.compute(2)
    emulation.compute(3)
    assert emulation.last_end - emulation.first_start >= 0.005
    emulation.reset()
    assert emulation.last_end == 0
