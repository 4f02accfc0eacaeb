"""R as an operation: where the pass puts it, what it costs, and what it saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import (
    InvalidSchedule,
    Op,
    OpKind,
    Placement,
    Schedule,
    ScheduleError,
    StageCosts,
    lower,
    simulate,
    validate,
)
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.formats import costs_from_json, costs_to_json
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import (
    Recompute,
    with_recomputation,
    with_recomputation_everywhere,
    without_recomputation,
)
from megatron.zero_bubble.schedule.step_ops import num_forwards_before_validation, with_post_validation
from tests.planner.planning import LITTLE
from tests.schedule.made_once import made_once

QUICK = [name for name in names() if not ENTRIES[name].is_slow and not ENTRIES[name].has_pairs]


@pytest.mark.parametrize("name", QUICK)
def test_every_schedule_can_recompute_everything(name):
    schedule = made_once(name, 4, 8, recompute=Recompute.FULL, effort=LITTLE)
    validate(schedule)
    validate(lower(schedule))
    kept = generate(name, 4, 8, recompute=Recompute.NONE, effort=LITTLE)
    assert not kept.recomputes
    for rank, ops in enumerate(schedule.ops):
        for position, op in enumerate(ops):
            if op.kind is OpKind.B or op.kind is OpKind.BW:
                keeps = ops[position - 1] == op._replace(kind=OpKind.F)
                assert (op._replace(kind=OpKind.R) in schedule.op_sets[rank]) != keeps


def test_the_bubble_of_zb_h1_does_not_grow_with_r():
    """With R apart the bubble is (p-1)(F+B-W) instead of (p-1)(F+R+B-W), here with F = R = B = W on 8 ranks."""
    costs = StageCosts.uniform(8, time_r=1)
    for name, m, inside, apart in (("1f1b", 16, 28, 21), ("zb-h1", 16, 14, 7), ("zb-h1", 32, 14, 7)):
        plain = generate(name, 8, m)
        in_backward = simulate(plain, costs.recomputing_in_backward())
        assert in_backward.cost == 4 * m + inside
        # The last stage recomputes nothing: its backward follows its F at once.
        schedule = with_recomputation(plain)
        assert not any(op.kind is OpKind.R for op in schedule.ops[-1])
        assert simulate(schedule, costs).cost <= 4 * m + apart


def test_the_pass_is_undone_and_can_be_repeated():
    plain = generate("zb-v", 4, 8)
    schedule = with_recomputation(plain)
    assert schedule == with_recomputation(schedule)
    assert without_recomputation(schedule) == plain


def test_what_f_drops_r_allocates():
    costs = StageCosts.uniform(2, memory_f=10, memory_b=-6, memory_w=-4, time_r=1, memory_r=9)
    ops = tuple(map(Op.parse, ["F0", "F1", "R0", "B0", "W0", "R1", "B1", "W1"]))
    last = tuple(map(Op.parse, ["F0", "B0", "W0", "F1", "B1", "W1"]))
    schedule = Schedule("small", Placement("linear", 2), 2, (ops, last))
    assert simulate(schedule, costs).peak_memory == (11, 10)


def test_costs_with_r_are_read_back_and_those_without_are_written_as_before():
    plain = StageCosts.uniform(3)
    assert "time_r" not in costs_to_json(plain)
    assert costs_from_json(costs_to_json(plain)) == plain
    costs = replace(plain, time_r=(1, 2, 0), memory_r=(0.5, 0.5, 0))
    assert costs_from_json(costs_to_json(costs)) == costs
    with pytest.raises(ScheduleError, match="time_r must not be negative, got -1"):
        replace(plain, time_r=(-1, 0, 0))


def test_r_after_its_backward_is_refused():
    schedule = with_recomputation(generate("zb-h1", 2, 4))
    ops = list(schedule.ops[0])
    r, b = ops.index(Op(OpKind.R, 1)), ops.index(Op(OpKind.B, 1))
    ops[r], ops[b] = ops[b], ops[r]
    with pytest.raises(InvalidSchedule, match="rank 0 runs B1 before R1, which it needs"):
        validate(replace(schedule, ops=(tuple(ops), *schedule.ops[1:])))


def test_r_may_stand_before_validate_and_is_run_again_with_it():
    costs = StageCosts.uniform(4, time_r=1)
    schedule = lower(with_post_validation(generate("zb-h2", 4, 8, recompute=Recompute.FULL), costs))
    validate(schedule)
    assert num_forwards_before_validation(schedule) > 0


def test_a_given_schedule_and_a_model_have_to_agree():
    plain = generate("zb-h1", 2, 4)
    recomputed = with_recomputation(plain)
    with pytest.raises(ScheduleError, match=r"zb-h1 has recomputations \(R\), but the model keeps all activations"):
        RunSchedules.of(recomputed).schedule(4)
    made = RunSchedules.of(plain).requesting(recomputes=(Recompute.FULL,)).schedule(4)
    assert made.without_communication() == recomputed


def test_only_planners_plan_recomputation():
    with pytest.raises(ScheduleError, match="schedule zb-h1 does not plan recomputation: choose one of "):
        generate("zb-h1", 2, 4, recompute=Recompute.PLANNED)


def test_by_default_r_takes_as_long_as_f_and_drops_all_but_the_input():
    costs = default_costs(Placement("v", 2, 2), Recompute.FULL)
    assert costs.time_r == costs.time_f
    assert costs.memory_r == (15 / 32,) * 4


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-zb"])
def test_the_schedule_that_measures_costs_recomputes_on_every_stage_in_no_more_memory(name):
    full = made_once(name, 4, 8, recompute=Recompute.FULL, effort=LITTLE)
    measuring = with_recomputation_everywhere(full)
    validate(measuring)
    assert without_recomputation(measuring) == without_recomputation(full)
    costs = default_costs(full.placement, Recompute.FULL)
    for rank, ops in enumerate(measuring.ops):
        assert {op.chunk for op in ops if op.kind is OpKind.R} == set(range(full.num_chunks))
        assert peak_memory(measuring, costs)[rank] <= peak_memory(full, costs)[rank]
