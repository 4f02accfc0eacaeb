"""Emulated replicas average for real, and take at least the time that the simulation says."""

from __future__ import annotations

import json

import pytest

from benchmarks.emulate_stragglers import main

FOUR = ["--num-replicas", "4", "--hierarchical-sgd", "2:2,4:4", "--parameters", "1000"]


@pytest.mark.exhaustive  # A run of processes; what it measures is in docs/replicas.md.
def test_hierarchical_replicas_gain_over_synchronous_ones(capsys):
    main([*FOUR, "--time-step", "20", "--steps", "8", "--rounds", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["synchronous", "local", "hierarchical"]
    assert all(each["emulated"] >= each["simulated"] for each in found.values())
    assert found["hierarchical"]["gains"][1] > 1.1


def test_mistakes_are_one_line(capsys):
    assert main([*FOUR, "--num-replicas", "8"]) == 2
    assert capsys.readouterr().err == (
        "benchmarks.emulate_stragglers: error: argument --hierarchical-sgd: ends with groups of 4, and --num-replicas "
        "is 8: the last group must be all replicas\n"
    )
