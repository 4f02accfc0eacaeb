"""`zero-bubble estimate stragglers` prints a table and draws, and refuses flags in one line."""

from __future__ import annotations

import json

import pytest

from megatron.zero_bubble.cli.estimate_command import main

COMMAND = ["stragglers", "--steps", "512"]


def test_the_table_and_the_drawings(tmp_path, capsys):
    plot, timeline = tmp_path / "plot.svg", tmp_path / "timeline.svg"
    assert main([*COMMAND, "--periods", "8,2", "--plot", str(plot), "--timeline", str(timeline)]) == 0
    heads, two, eight = capsys.readouterr().out.splitlines()
    assert heads.split("  ")[0] == "all average every"
    assert two.split()[:2] == ["2", "5"]
    assert two.split()[-1] == "-"
    assert eight.split()[0] == "8"
    assert eight.split()[-1] == "2:2,4:4,8:8"
    assert "hierarchical" in plot.read_text()
    assert "hierarchical SGD 2:2,4:4,8:8: 4 steps end at" in timeline.read_text()


def test_json_has_times_in_the_unit_of_the_step(capsys):
    flags = ["--straggler", "fixed", "--slowdown", "2", "--time-step", "300", "--time-average", "10", "--json"]
    assert main([*COMMAND, *flags, "--periods", "8"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["synchronous"] == 610
    [row] = document["periods"]
    assert row["local"] == pytest.approx(600 + 10 / 8)
    assert row["levels"] == "2:2,4:4,8:8"


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
        (["--periods", "4,0"], "argument --periods: must be at least 1, got 0"),
        (["--num-replicas", "1"], "argument --num-replicas: must be at least 2, got 1"),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert main([*COMMAND, *flags]) == 2
    assert capsys.readouterr().err == f"zero-bubble estimate: error: {message}\n"
