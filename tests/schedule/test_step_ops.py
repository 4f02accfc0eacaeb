"""The passes that put STEP and VALIDATE into a schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron.zero_bubble.planner import names
from megatron.zero_bubble.schedule import (
    InvalidSchedule,
    Op,
    OpKind,
    Schedule,
    StageCosts,
    iteration_time,
    lower,
    repeat,
    simulate,
    validate,
    with_post_validation,
)
from megatron.zero_bubble.schedule.kinds import POST_VALIDATION, RECEIVES
from megatron.zero_bubble.schedule.step_ops import (
    before_validation,
    num_forwards_before_validation,
)
from tests.schedule.made_once import made_once

STEP, VALIDATE = Op(OpKind.STEP, 0), Op(OpKind.VALIDATE, 0)
PARALLELOGRAMS = ("zb-h2", "zb-2p", "zb-v")
"""Schedules whose ranks end one after the other, as they begin."""
TRAPEZOIDS = ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "v-half")


def made(name: str, p: int = 4, m: int = 8, **costs: float) -> tuple[Schedule, StageCosts]:
    schedule = made_once(name, p, m)
    all_costs = StageCosts.uniform(schedule.num_stages, **costs)
    return with_post_validation(schedule, all_costs), all_costs


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8)])
def test_every_schedule_of_the_registry_can_be_post_validated(name, p, m):
    schedule, _ = made(name, p, m)
    validate(schedule)
    validate(lower(schedule))
    assert schedule.without(POST_VALIDATION) == made_once(name, p, m)


@pytest.mark.parametrize("name", PARALLELOGRAMS)
def test_a_parallelogram_repeats_without_a_gap(name):
    """The next iteration of a rank begins when its last one ends: iterations take the span, not the makespan."""
    schedule, costs = made(name)
    once = simulate(schedule.without(POST_VALIDATION), costs)
    assert iteration_time(schedule, costs) == once.cost < once.makespan
    assert iteration_time(schedule.without(POST_VALIDATION), costs) == once.makespan


@pytest.mark.parametrize("name", TRAPEZOIDS)
def test_a_trapezoid_gains_nothing(name):
    schedule, costs = made(name)
    assert iteration_time(schedule, costs) == simulate(schedule.without(POST_VALIDATION), costs).makespan


@pytest.mark.parametrize("comm", [0, 0.25])
@pytest.mark.parametrize("name", PARALLELOGRAMS)
def test_validation_waits_for_nothing(name, comm):
    """The state of all gradients, reduced when the last rank has stepped, is there before VALIDATE is reached."""
    schedule, costs = made(name, time_comm=comm)
    timeline = simulate(repeat(schedule, 3), costs)
    for lane in timeline.lanes:
        for before, timed in pairwise(lane):
            if timed.op.kind is OpKind.VALIDATE:
                assert timed.start == before.end


def test_validation_does_wait_where_a_backward_comes_before_the_state():
    schedule, costs = made("1f1b")
    (first, *_) = simulate(repeat(schedule, 2), costs).lanes
    (validated,) = (timed for timed in first if timed.op == Op(OpKind.VALIDATE, 1))
    last_step = max(timed.end for timed in first if timed.op.kind is OpKind.STEP and timed.op.microbatch == 0)
    assert validated.start >= last_step


def test_few_forwards_stand_before_validation_and_fewer_on_later_ranks():
    schedule, _ = made("zb-2p")
    assert [before_validation(schedule, rank) for rank in (2, 3)] == [
        (Op(OpKind.F, 0), Op(OpKind.F, 1)),
        (Op(OpKind.F, 0),),
    ]
    assert num_forwards_before_validation(schedule) == 4 + 3 + 2 + 1
    assert num_forwards_before_validation(schedule.without(POST_VALIDATION)) == 0


# Receives of dualpipe-v are posted early: a message that comes before a VALIDATE is received before it.
@pytest.mark.parametrize("name", [name for name in names() if name != "dualpipe-v"])
def test_no_message_for_later_is_received_before_validation(name):
    """A forward that is run again receives again; every other message is received once."""
    schedule = lower(made(name)[0])
    for rank in range(schedule.num_ranks):
        early = before_validation(schedule, rank)
        received = {op for op in early if op.kind in RECEIVES}
        used = {Op(OpKind.RECV_FORWARD, op.microbatch, op.chunk) for op in early if op.kind is OpKind.F}
        assert received <= used


def test_repeated_iterations_are_numbered_on_and_the_first_has_nothing_to_validate():
    schedule, _ = made("zb-h2", 2, 3)
    twice = repeat(schedule, 2)
    assert twice.num_microbatches == 6
    assert [op.microbatch for op in twice.ops[0] if op.kind is OpKind.F] == [0, 1, 2, 3, 4, 5]
    assert [op for op in twice.ops[0] if op.kind in (OpKind.STEP, OpKind.VALIDATE)] == [
        STEP,
        Op(OpKind.VALIDATE, 1),
        Op(OpKind.STEP, 1),
    ]


def moved(schedule: Schedule, rank: int, op: Op, position: int) -> Schedule:
    ops = [other for other in schedule.ops[rank] if other != op]
    ops.insert(position, op)
    return replace(schedule, ops=(*schedule.ops[:rank], tuple(ops), *schedule.ops[rank + 1 :]))


def test_what_is_no_post_validation_is_refused_in_one_line():
    schedule, _ = made("zb-2p")
    length = len(schedule.ops[1])
    wrong = {
        "rank 1 runs VALIDATE0 0 times, not once": replace(
            schedule,
            ops=(schedule.ops[0], tuple(op for op in schedule.ops[1] if op != VALIDATE), *schedule.ops[2:]),
        ),
        "rank 1 runs STEP0 2 times|rank 1 runs STEP0 twice": replace(
            schedule, ops=(schedule.ops[0], (*schedule.ops[1], STEP), *schedule.ops[2:])
        ),
        "rank 1 runs W7 after STEP0": moved(schedule, 1, STEP, length - 2),
        "rank 1 runs B0 before VALIDATE0": moved(schedule, 1, VALIDATE, length - 2),
        "rank 1 runs F0 before VALIDATE0, but rank 0 runs F0, which it needs, after its own VALIDATE0": moved(
            schedule, 0, VALIDATE, 0
        ),
    }
    for message, broken in wrong.items():
        with pytest.raises(InvalidSchedule, match=rf"^[^\n]*({message})[^\n]*$"):
            validate(broken)
