"""Steps are planned once the costs of sizes are measured, the same on all ranks, within the memory of all pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from megatron.zero_bubble.planner.generate import request_for
from megatron.zero_bubble.planner.microbatch_order import like_order
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.planner.step_plan import StepPlan, StepProblem, StepRules
from megatron.zero_bubble.runtime import step_planner
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.recorder import HostClock, MeasuredOp
from megatron.zero_bubble.runtime.step_planner import PlanningProcess, StepDecision, StepPlanner
from megatron.zero_bubble.schedule import Infeasible, Op, OpKind, StageCosts
from megatron.zero_bubble.schedule.sized_costs import MicrobatchSize

T = TypeVar("T")
COSTS = StageCosts.uniform(2, 1.0, 1.0, 1.0, 0.1, 10.0, -5.0, -5.0)
"""Those of a microbatch of 10 tokens: a token keeps one byte."""
PLAN = RunSchedules(request_for("auto", 2, 1, costs=COSTS, memory_limit=30.0))


class Alone:
    """The first rank of a pipeline, beside another one that needs a level of memory."""

    def __init__(self, level: int = 0) -> None:
        self.level = level

    def on_first(self, action: Callable[[], T]) -> T:
        return action()

    def gather(self, value: T) -> list[T]:
        return [value]

    def highest(self, level: int) -> int:
        return max(level, self.level)


def sizes_of(*lengths: int) -> list[MicrobatchSize]:
    return [MicrobatchSize.of([length]) for length in lengths]


def measured(microbatch: int, tokens: int) -> list[MeasuredOp]:
    changes = {OpKind.F: tokens, OpKind.B: -tokens // 2, OpKind.W: -tokens // 2}
    return [MeasuredOp(Op(kind, microbatch), 0.0, tokens / 1e4, held) for kind, held in changes.items()]


def planner_after(num_steps: int, peers: Alone | None = None) -> StepPlanner:
    """The planner of a run that has measured so many steps, of microbatches of 10, 20, 30 and 40 tokens."""
    observer = StepObserver(HostClock())
    planner = StepPlanner(PLAN.placement, 0, observer, (1, 2), peers or Alone())
    lengths = (10, 20, 30, 40)
    for step in range(1, num_steps + 1):
        planner.decide(step, StepRules(PLAN), 4, lambda: sizes_of(*lengths))
        for sink in observer.sinks:
            sink(step, [op for k, tokens in enumerate(lengths) for op in measured(k, tokens)])
        planner.after_step(step, lambda: COSTS)
    return planner


def decide(
    planner: StepPlanner,
    lengths: tuple[int, ...],
    limit: float | None = None,
    ahead: tuple[int, ...] = (),
    **options: bool,
) -> StepDecision:
    rules = StepRules(PLAN, None if limit is None else (limit, limit), **options)
    return planner.decide(9, rules, len(lengths), lambda: sizes_of(*lengths), lambda: sizes_of(*ahead))


def test_a_step_has_the_order_of_the_data_until_costs_are_measured():
    lengths = (80, 10, 10, 10, 10, 10)
    assert decide(planner_after(1), lengths).order is None
    planner = planner_after(2)
    decision = decide(planner, lengths)
    assert decision.order is not None
    assert decision.places != (0, 1, 2, 3, 4, 5)
    assert decide(planner, lengths, reorders=False).places == (0, 1, 2, 3, 4, 5)
    assert decision.in_data_order([f"loss {number}" for number in decision.places]) == [f"loss {k}" for k in range(6)]
    times = planner.take_times()
    assert times.num_steps == 2
    assert times.predicted < times.predicted_in_data_order
    assert planner.take_times().num_steps == 0


def test_sizes_that_cannot_be_told_or_are_alike_need_no_plan():
    planner = planner_after(2)
    assert decide(planner, (10, 10, 10)).order is None
    assert planner.decide(9, StepRules(PLAN), 2, lambda: [None, None]) == StepDecision(None, (0, 1))


def test_alike_microbatches_that_are_too_long_take_a_schedule_for_less_memory():
    planner = planner_after(2)
    assert decide(planner, (10,) * 4, 30.0).schedule is None
    decision = decide(planner, (25,) * 4, 30.0)
    assert decision.level > 0
    assert decision.schedule == PLAN.in_less_memory(4, decision.level)
    assert planner.take_times().num_in_less_memory == 1


def test_a_pipeline_runs_the_schedule_that_another_one_needs():
    decision = decide(planner_after(2, Alone(level=1)), (10,) * 4, 30.0)
    assert decision.level == 1
    assert decision.schedule == PLAN.in_less_memory(4, 1)


def test_a_sequence_that_does_not_fit_is_named():
    with pytest.raises(Infeasible, match=r"microbatch 1 \(50 tokens\), keeps 50B alone"):
        decide(planner_after(2), (10, 50, 10), 30.0)


class Ahead(PlanningProcess):
    """Plans ahead in this process, when it is told to."""

    def __init__(self) -> None:
        self.problem: StepProblem | None = None
        self.is_late = self.has_ended = False

    @property
    def is_busy(self) -> bool:
        return self.is_late

    def ask(self, problem: StepProblem) -> None:
        self.problem = problem

    def plans(self, problem: StepProblem) -> bool:
        return self.problem is not None and self.problem.is_as(problem)

    def answer(self) -> StepPlan | Infeasible | None:
        try:
            return None if self.has_ended or self.problem is None else self.problem.solve()
        except Infeasible as error:
            return error


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    """The process in which steps are planned ahead."""
    process = Ahead()
    monkeypatch.setattr(step_planner, "PlanningProcess", lambda: process)
    return process


LENGTHS, NEXT = (80, 10, 10, 10, 10, 10), (10, 10, 70, 10, 20, 10)


def test_the_next_step_is_planned_while_this_one_runs(ahead: Ahead):
    planner, expected = planner_after(2), decide(planner_after(2), NEXT)
    assert ahead.problem is None
    decide(planner, LENGTHS, ahead=NEXT)
    assert ahead.problem is not None
    assert ahead.problem.sizes == tuple(sizes_of(*NEXT))
    decision = decide(planner, NEXT)
    assert (decision.places, decision.order) == (expected.places, expected.order)
    # The plan is for other sizes.
    assert decide(planner, LENGTHS) != decision


@pytest.mark.parametrize("limit", [None, 1000.0])
def test_a_late_plan_is_replaced_by_the_last_order_where_no_limit_holds(ahead: Ahead, limit: float | None):
    planner = planner_after(2)
    first = decide(planner, LENGTHS, limit, ahead=NEXT)
    ahead.is_late = True
    late = decide(planner, NEXT, limit)
    if limit is None:
        assert late.order is None
        assert late.places == like_order(first.places, LENGTHS, NEXT)
        times = planner.take_times()
        assert (times.num_late, times.num_steps) == (1, 1)
    else:
        assert late.places == decide(planner_after(2), NEXT, limit).places
        assert planner.take_times().num_late == 0


def test_a_sequence_that_does_not_fit_is_named_by_the_step_that_has_it(ahead: Ahead):
    planner = planner_after(2)
    decide(planner, (10, 10, 10), 30.0, ahead=(10, 50, 10))
    with pytest.raises(Infeasible, match=r"microbatch 1 \(50 tokens\), keeps 50B alone"):
        decide(planner, (10, 50, 10), 30.0)


def test_a_step_is_planned_at_its_beginning_if_the_process_has_ended(ahead: Ahead):
    planner = planner_after(2)
    decide(planner, LENGTHS, ahead=NEXT)
    ahead.has_ended = True
    assert decide(planner, NEXT).order is not None
