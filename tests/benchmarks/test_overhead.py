"""The benchmark of the runtime's own costs: what it prints, never how fast it was."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.executor_overhead import seconds_per_op
from benchmarks.overhead import main, make_row, overhead_table
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import lower
from tests.mistakes import one_line_mistake

ROOT = Path(__file__).parents[2]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.overhead", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.exhaustive  # half a minute of measuring; what it prints is quick to test, below
def test_every_measure_as_json():
    result = run("--rounds", "2", "--steps", "1", "--model", "quickstart", "--json")
    assert result.returncode in (0, 1), result.stderr  # 1: a target was missed, on whatever machine this is
    rows = json.loads(result.stdout)
    assert [row["measure"] for row in rows] == [
        *["executor, per operation", "recording an operation"] * 3,
        *("exposed communication", "executor and gloo, per operation", "gathering the bubble rate, per log line"),
        *("fused backward", "B", "W", "B + W / fused backward"),
    ]
    for row in rows:
        assert math.isfinite(row["value"])
        assert row["value"] > 0 or row["measure"].startswith("recording"), "a difference of two small times"
    assert {row["target"] for row in rows} == {100, 1.03, None}
    missed = [row for row in rows if row["target"] is not None and row["value"] > row["target"]]
    assert result.returncode == bool(missed)
    assert result.stderr.count("above the target") == len(missed)


@pytest.mark.parametrize("flags", [("--rounds", "1"), ("--steps", "x"), ("--model", "huge"), ("--output",)])
def test_a_mistake_is_one_line(flags, capsys):
    assert one_line_mistake(main, flags, capsys).startswith("benchmarks.overhead: error: ")


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved-zb"])
def test_an_executor_without_compute_runs_every_rank(name):
    measured = seconds_per_op(lower(generate(name, 3, 6)), steps=2)
    assert len(measured) == 3 * 2
    assert all(plain > 0 and recorded > 0 for plain, recorded in measured)


def test_a_row_is_the_median_with_quartiles():
    row = make_row("executor", "zb-h1", "µs", [5, 1, 2, 3, 4], target=2.5)
    assert (row.value, row.low, row.high, row.is_missed) == (3, 1.5, 4.5, True)
    assert make_row("executor", "zb-h1", "µs", [7]).low == 7
    assert not make_row("executor", "zb-h1", "µs", [7]).is_missed
    assert overhead_table([row], markdown=True).splitlines()[-1].split("|")[1].strip() == "executor (zb-h1)"
