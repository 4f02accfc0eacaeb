"""Steps are planned once the costs of sizes are measured, the same on all ranks, within the memory of all pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from megatron.zero_bubble.planner.generate import request_for
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.runtime.observer import StepObserver
from megatron.zero_bubble.runtime.recorder import HostClock, MeasuredOp
from megatron.zero_bubble.runtime.step_planner import StepDecision, StepPlanner, whole_limits
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
        planner.decide(step, lambda: sizes_of(*lengths), PLAN, 4)
        for sink in observer.sinks:
            sink(step, [op for k, tokens in enumerate(lengths) for op in measured(k, tokens)])
        planner.after_step(step, lambda: COSTS)
    return planner


def decide(planner: StepPlanner, lengths: tuple[int, ...], limit: float | None = None, **options: bool) -> StepDecision:
    limits = None if limit is None else (limit, limit)
    return planner.decide(9, lambda: sizes_of(*lengths), PLAN, len(lengths), limits, **options)


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
    assert planner.decide(9, lambda: [None, None], PLAN, 2) == StepDecision(None, (0, 1))


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
    with pytest.raises(Infeasible, match=r"microbatch 1 \(50 tokens\), keeps 50 alone"):
        decide(planner_after(2), (10, 50, 10), 30.0)


def test_operations_need_memory_on_top_of_what_they_leave_behind():
    assert whole_limits((10.0, 20.0), (1.0, 2.0)) == (11.0, 22.0)
