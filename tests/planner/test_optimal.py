"""The constraint program: never worse than its start, better where there is room, its bound a bound."""

from __future__ import annotations

import builtins

import pytest

from megatron.zero_bubble.planner import generate, request_for
from megatron.zero_bubble.planner.optimal import solve
from megatron.zero_bubble.schedule import Infeasible, ScheduleError, StageCosts, lower, simulate, validate

pytest.importorskip("ortools", reason="the extra `solver` is not installed")

UNEVEN = StageCosts((3, 8, 5), (6, 2, 7), (4, 4, 2), (1, 0), (1,) * 3, (-0.5,) * 3, (-0.5,) * 3)


@pytest.mark.parametrize("limit", [1, 1.5, 2, 3])
def test_between_the_bound_and_its_start(limit):
    solution = solve(request_for("optimal", 3, 3, costs=UNEVEN, memory_limit=[limit] * 3), time_limit=5)
    validate(lower(solution.schedule))
    timeline = simulate(solution.schedule, UNEVEN)
    assert solution.bound * (1 - 1e-9) <= timeline.cost == solution.cost
    assert timeline.cost <= simulate(generate("auto", 3, 3, costs=UNEVEN, memory_limit=limit), UNEVEN).cost
    assert max(timeline.peak_memory) <= limit


def test_better_than_the_heuristic_where_there_is_room():
    costs = StageCosts((9, 2, 7, 3), (2, 8, 3, 9), (5, 3, 8, 2), (1, 2, 0), (1,) * 4, (-0.5,) * 4, (-0.5,) * 4)
    heuristic = simulate(generate("auto", 4, 5, costs=costs, memory_limit=2), costs).cost
    assert solve(request_for("optimal", 4, 5, costs=costs, memory_limit=[2] * 4), time_limit=6).cost <= heuristic


def test_four_ranks_and_eight_microbatches_are_proven():
    costs = StageCosts.uniform(4, 18.5, 18.1, 9.3, 0.6)
    assert solve(request_for("optimal", 4, 8, costs=costs, memory_limit=[8] * 4)).is_optimal


def test_a_published_schedule_is_not_below_the_solvers_bound():
    costs = StageCosts.uniform(3, 3, 2, 1, 0.5)
    solution = solve(request_for("optimal", 3, 4, costs=costs, memory_limit=[3] * 3), time_limit=5)
    assert simulate(generate("zb-h1", 3, 4), costs).cost >= solution.bound * (1 - 1e-9)


def test_too_small_a_limit_and_too_large_an_instance():
    with pytest.raises(Infeasible):
        generate("optimal", 3, 3, costs=UNEVEN, memory_limit=0.5)
    with pytest.raises(ScheduleError, match="small instances: 32 ranks x 96 microbatches"):
        generate("optimal", 32, 96)


def test_without_the_solver_the_extra_is_named(monkeypatch):
    imports = builtins.__import__

    def without_ortools(name, *args, **kwargs):
        if name.startswith("ortools"):
            raise ImportError(name)
        return imports(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_ortools)
    with pytest.raises(ScheduleError, match=r"pip install 'megatron-zero-bubble\[solver\]'"):
        solve(request_for("optimal", 3, 3, costs=UNEVEN, memory_limit=[1.5] * 3))


def test_the_default_limit_has_room_for_memory_that_w_leaves_allocated():
    costs = StageCosts.uniform(2, memory_f=1, memory_b=-0.25, memory_w=-0.25)
    cost = simulate(generate("optimal", 2, 8, costs=costs), costs).cost
    assert cost <= simulate(generate("zb-2p", 2, 8, costs=costs), costs).cost * (1 + 1e-9)


def test_a_large_instance_is_refused_however_many_microbatches_it_has():
    with pytest.raises(ScheduleError, match="small instances"):
        generate("optimal", 4, 2000)
