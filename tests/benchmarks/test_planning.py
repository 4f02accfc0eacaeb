"""The random problems of benchmarks/planning.py, and its table."""

from __future__ import annotations

import json

import pytest

from benchmarks.planning import main, planned_problem, random_problem
from tests.mistakes import one_line_mistake


@pytest.mark.parametrize("kind", ["linear", "interleaved", "v"])
def test_a_problem_depends_on_its_number_alone(kind):
    problem, multiple = random_problem(kind, 3)
    assert (problem, multiple) == random_problem(kind, 3) != random_problem(kind, 4)
    assert problem.placement.kind == kind
    assert problem.is_feasible


@pytest.mark.parametrize(("kind", "number"), [("linear", 5), ("interleaved", 10), ("v", 3)])
def test_no_plan_is_below_the_bound_or_above_a_named_schedule(kind, number):
    found = planned_problem(kind, number)
    assert found.above_bound >= -1e-9
    assert found.beside_named is None or found.beside_named <= 1e-9


def test_named_schedules_are_planned_at_other_sizes(capsys):
    assert main(["--scale", "--schedule", "1f1b", "--schedule", "zb-h1", "--size", "4x8", "--json"]) == 0
    problems = [one["problem"] for one in json.loads(capsys.readouterr().out)]
    assert [(one["schedule"], one["num_ranks"], one["num_microbatches"]) for one in problems] == [
        ("1f1b", 4, 8),
        ("zb-h1", 4, 8),
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--schedule", "zb-h1"], "argument --schedule: needs --scale"),
        (["--scale", "--size", "4x8"], "argument --size: needs --schedule"),
        (["--scale", "--schedule", "zb-h1", "--size", "4"], "expected ranks x microbatches, as in 32x256, got '4'"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(flags, words, capsys):
    assert words in one_line_mistake(main, flags, capsys)


def test_the_table_has_a_row_for_all_problems(capsys):
    assert main(["--placement", "interleaved", "--problems", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["interleaved", "all", "1"]
    assert main(["--placement", "interleaved", "--problems", "1", "--json"]) == 0
    assert [one["number"] for one in json.loads(capsys.readouterr().out)] == [0]
