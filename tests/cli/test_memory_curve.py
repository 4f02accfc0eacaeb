"""`zero-bubble schedule memory-curve`: the plan for each memory limit; `--dial` compares keeping, R and copies."""

from __future__ import annotations

import json
import os

import pytest

from megatron.zero_bubble.schedule import Placement, StageCosts
from megatron.zero_bubble.schedule.formats import Profile, profile_to_json

SIZE = ["--pipeline-size", "4", "--num-microbatches", "8"]
SHORT = ["--pipeline-size", "4", "--num-microbatches", "6"]


@pytest.mark.exhaustive  # ten seconds
def test_with_more_memory_no_plan_of_a_memory_curve_is_slower(ok):
    """Planned alone, the plan for 1.25 p M_B has twice the bubble of the plan for 1 p M_B, which fits there, too."""
    costs = ["--time-f", "18,8.2,9.7,10.9", "--time-b", "12.3,11.6,12.8,18.9", "--time-w", "7"]
    limits = ["--from", "0.75", "--to", "1.5", "--step", "0.25"]
    size = ["--pipeline-size", "4", "--num-microbatches", "9", "--schedule", "zb-v", "--recompute", "planned"]
    points = json.loads(ok("memory-curve", *size, *costs, *limits, "--json"))
    bubbles = [point["bubble_rate"] for point in points]
    assert bubbles == sorted(bubbles, reverse=True)
    assert all(point["peak_memory"] <= point["memory_limit"] for point in points)


def test_the_memory_curve_has_a_row_for_each_limit_and_no_point_below_a_schedules_memory(ok, tmp_path):
    flags = ["--schedule", "auto", "--schedule", "zb-v", *SIZE, "--from", "0.2", "--to", "1.8", "--step", "0.8"]
    lines = ok("memory-curve", *flags).splitlines()
    assert lines[1].split() == ["0.2", "-", "-"]
    assert lines[2].split() == ["1", "11.11%", "0.00%"]
    assert lines[3].split() == ["1.8", "0.00%", "0.00%"]
    tenths = ["--from", "0.1", "--to", "0.3", "--step", "0.1"]
    assert [line.split()[0] for line in ok("memory-curve", *flags, *tenths).splitlines()[1:]] == ["0.1", "0.2", "0.3"]
    path = tmp_path / "curve.svg"
    points = json.loads(ok("memory-curve", *flags, "--json", "--output", path))
    assert [point["memory_limit"] for point in points[:3]] == pytest.approx([0.8, 4, 7.2])
    assert [point["bubble_rate"] for point in points[-1:]] == [0]
    assert path.read_text().startswith("<svg")


def test_planned_recomputation_goes_from_everything_recomputed_to_everything_kept(ok, tmp_path):
    flags = ["--recompute", "planned", *SHORT, "--to", "2", "--step", "0.25"]
    points = json.loads(ok("memory-curve", *flags, "--json"))
    assert points[0]["memory_limit"] == 0.5, "by default it begins below what keeping needs"
    found = [point for point in points if point["lost"] is not None]
    assert found[0]["recomputed"] > 0.5
    assert found[-1]["recomputed"] == 0
    lost = [point["lost"] for point in found]
    assert lost == sorted(lost, reverse=True)
    ok("memory-curve", *flags, "--output", tmp_path / "curve.svg")
    assert "bubble and recomputation (%)" in (tmp_path / "curve.svg").read_text()


def test_the_dial_shows_times_by_what_a_plan_may_do(ok, tmp_path):
    flags = ["--dial", "--time-d", "0.5", "--from", "0.5", "--to", "1", "--step", "0.5", *SHORT]
    path = tmp_path / "dial.svg"
    lines = ok("memory-curve", *flags, "--output", path).splitlines()
    assert lines[0].split() == ["limit", "(p", "M_B)", "keep", "drop", "offload", "both"]
    keep, drop, offload, both = lines[1].split()[1:]
    assert float(both) <= min(map(float, (keep, drop, offload)))
    assert float(offload) < float(keep)
    assert lines[3].startswith("1 is ")
    assert lines[4].endswith(f"times as long: {keep} (keep), {drop} (drop), {offload} (offload), {both} (both)")
    assert "50% less memory" in lines[4]
    assert "time relative to the fastest plan" in path.read_text()
    points = json.loads(ok("memory-curve", *flags, "--json"))
    assert [point["way"] for point in points[::2]] == ["keep", "drop", "offload", "both"]
    halves = {point["way"]: point for point in points if point["memory_limit"] == 2}
    assert halves["offload"]["host_memory"] > 0 == halves["keep"]["host_memory"]
    assert halves["keep"]["offloaded"] == 0 < halves["offload"]["offloaded"]


def test_the_dial_of_a_profile_is_in_its_bytes_and_takes_the_links_speed(ok, tmp_path):
    path = tmp_path / "profile.json"
    costs = StageCosts.uniform(4, 10, 10, 10, 0, 2**30, -(2**29), -(2**29))
    path.write_text(profile_to_json(Profile(Placement("linear", 4), costs, 0.0, {})))
    flags = ["memory-curve", "--dial", "--costs", path, "--from", "0.5", "--to", "1", "--step", "0.5", *SHORT]
    unknown = ok(*flags).splitlines()
    assert unknown[0].split()[3:] == ["MiB", "keep"]
    assert unknown[1].split()[1] == "2048"
    assert unknown[-1].startswith("left out: drop, offload, both, which ")
    slow, fast = (ok(*flags, "--host-bandwidth", speed).splitlines() for speed in ("0.001", "400"))
    assert slow[0].split()[3:] == ["MiB", "keep", "offload"]
    assert slow[1].split()[2:] == [unknown[1].split()[2]] * 2, "copies that take minutes gain nothing"
    assert float(fast[1].split()[3]) < float(fast[1].split()[2])


def test_costs_may_come_from_a_pipe(ok):
    """A pipe, as of `--costs <(command)`, can be read only once."""
    costs = StageCosts.uniform(4, 10, 10, 10, 0, 2**30, -(2**29), -(2**29))
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as pipe:
        pipe.write(profile_to_json(Profile(Placement("linear", 4), costs, 0.0, {})))
        pipe.close()
        flags = ["--dial", "--from", "0.5", "--to", "1", "--step", "0.5", *SHORT]
        assert "MiB" in ok("memory-curve", *flags, "--costs", f"/dev/fd/{reading}")
