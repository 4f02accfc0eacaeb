"""The random problems of benchmarks/planning.py, and its table."""

from __future__ import annotations

import json

import pytest

from benchmarks.planning import main, planned_problem, random_problem


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


def test_the_table_has_a_row_for_all_problems(capsys):
    assert main(["--placement", "interleaved", "--problems", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["interleaved", "all", "1"]
    assert main(["--placement", "interleaved", "--problems", "1", "--json"]) == 0
    assert [one["number"] for one in json.loads(capsys.readouterr().out)] == [0]
