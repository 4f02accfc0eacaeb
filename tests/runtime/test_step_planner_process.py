"""Another process plans the same step, and its end is no error."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.planner.generate import request_for
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.planner.step_plan import StepPlan, StepProblem, StepRules
from megatron.zero_bubble.runtime.step_planner import PlanningProcess
from megatron.zero_bubble.schedule import Infeasible, StageCosts
from megatron.zero_bubble.schedule.sized_costs import Curve, MicrobatchSize, SizedCosts

USUAL = StageCosts.uniform(3, 1.0, 1.0, 1.0, 0.1, 10.0, -5.0, -5.0)
COSTS = SizedCosts(
    USUAL,
    {name: (Curve(0.0, getattr(USUAL, name)[0] / 10, 0.0),) * 3 for name in ("time_f", "time_b", "time_w", "memory_f")},
)


def problem_of(*lengths: int, limit: float | None = None) -> StepProblem:
    rules = StepRules(RunSchedules(request_for("zb-h1", 3, 1, costs=USUAL)), None if limit is None else (limit,) * 3)
    return StepProblem(rules, COSTS, tuple(MicrobatchSize.of([length]) for length in lengths))


def test_answers_are_those_of_this_process_until_the_worker_ends():
    process = PlanningProcess()
    problem, too_long = problem_of(10, 10, 70, 10, 20), problem_of(10, 80, limit=50.0)
    process.ask(problem)
    assert process.plans(problem)
    answer = process.answer()
    assert isinstance(answer, StepPlan)
    assert answer[:3] == problem.solve()[:3]
    assert answer.milliseconds > 0
    assert not process.is_busy
    process.ask(too_long)
    assert not process.plans(problem)
    with pytest.raises(Infeasible) as refused:
        too_long.solve()
    assert str(process.answer()) == str(refused.value)
    process.worker.kill()
    process.ask(problem)
    assert process.answer() is None
    process.close()
    assert process.worker.returncode
