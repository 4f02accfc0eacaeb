from __future__ import annotations

import gc
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.schedule import Deadlock, Infeasible, InvalidSchedule, Schedule, StageCosts, lower, validate
from tests.schedule.random_schedules import runs, schedules, starts_on_streams
from tests.schedule.test_lower import made_of


@pytest.mark.parametrize("name", names())
def test_generated_schedules_are_valid(name):
    schedule = generate(name, 3, 6)
    validate(schedule)
    validate(lower(schedule))
    validate(schedule.forward_only())
    validate(lower(schedule.forward_only()))


ONE_RANK = {
    "F0 F1 B0 W0 B1": "rank 0 lacks W1",
    "F0 F1 B0 W0 W1": "rank 0 lacks B1",
    "F0 B0 W0 B1 W1": "rank 0 lacks F1",
    "F0 F1 BW0": "rank 0 lacks B1",
    "F0 F1 BW0 BW1 BW1": "rank 0 runs BW1 twice",
    "F0 F1 BW0 BW1 W1": "rank 0 runs BW1 and also W1",
    "F0 F1 BW0 BW1 B1": "rank 0 runs BW1 and also B1",
    "F0 F1 F2 BW0 BW1 BW2": "rank 0 runs F2, but there are 2 microbatches and 1 chunks",
    "F0 F1 BW0 BW1.1": "rank 0 runs BW1.1, but there are 2 microbatches and 1 chunks",
    "F0 F1 W0 B0 B1 W1": "rank 0 runs W0 before B0, which it needs",
    "F0 BW1 BW0 F1": "rank 0 runs BW0 after BW1: gradients of inputs go in microbatch order",
    "F0 BW0 BW1 F1": "rank 0 runs BW1 before F1, which it needs",
    "F1 F0 BW0 BW1": "rank 0 runs F0 after F1: forwards of a stage go in microbatch order",
    "F0 F1 B1 B0 W0 W1": "rank 0 runs B0 after B1: gradients of inputs of a stage go in microbatch order",
    "F0 F1 B0 B1 W1 W0": "rank 0 runs W0 after W1: gradients of weights of a stage go in microbatch order",
    "F0 F1 B0 BW1 W0": "rank 0 runs W0 after BW1: gradients of weights of a stage go in microbatch order",
}


@pytest.mark.parametrize("ops", ONE_RANK)
def test_a_wrong_rank_is_named_with_its_op(ops):
    message = ONE_RANK[ops].replace("gradients of inputs go", "gradients of inputs of a stage go")
    with pytest.raises(InvalidSchedule) as error:
        validate(made_of("linear", 1, 1, 2, ops))
    assert str(error.value) == f"schedule test: {message}"


def test_the_turn_of_a_v_is_a_dependency_within_a_rank():
    with pytest.raises(InvalidSchedule, match=r"rank 1 runs F0.1 before F0, which it needs"):
        validate(made_of("v", 2, 2, 1, "F0 F0.1 BW0.1 BW0", "F0.1 F0 BW0.1 BW0"))


def test_no_microbatches_is_no_schedule():
    with pytest.raises(InvalidSchedule, match="0 microbatches"):
        validate(made_of("linear", 1, 1, 0, ""))


def test_a_forward_in_a_pair_is_not_recomputed():
    """A pair keeps the activations of its forward, so that R would have nothing to restore."""
    validate(made_of("linear", 1, 1, 2, "F0 R0 F1 BW0 R1 BW1"))
    with pytest.raises(InvalidSchedule) as error:
        validate(made_of("linear", 1, 1, 2, "F0 R0 F1 &BW0 R1 BW1"))
    assert str(error.value) == "schedule test: rank 0 runs R1, but F1 runs in a pair, which keeps its activations"


def test_ranks_that_wait_for_each_other_are_told_apart():
    """Rank 0 wants B0 before it makes F1, rank 1 wants F1 before it makes B0; rank 2 only waits for rank 1."""
    with pytest.raises(Deadlock) as error:
        validate(made_of("linear", 3, 1, 2, "F0 BW0 F1 BW1", "F0 F1 BW0 BW1", "F0 F1 BW0 BW1"))
    assert str(error.value) == (
        "schedule test deadlocks: rank 0 at BW0 waits for B0 of stage 1 on rank 1; "
        "rank 1 at F1 waits for F1 of stage 0 on rank 0"
    )


LOWERED = {
    ("F0 RB0 BW0", "RF0 F0 BW0 SB0"): "rank 0 lacks SEND_FORWARD0 for F0",
    ("F0 SF0 BW0", "RF0 F0 BW0 SB0"): "rank 0 lacks RECV_BACKWARD0 for BW0",
    ("SF0 F0 RB0 BW0", "RF0 F0 BW0 SB0"): "rank 0 runs SEND_FORWARD0 before F0, which makes the tensor",
    ("F0 SF0 BW0 RB0", "RF0 F0 BW0 SB0"): "rank 0 runs BW0 before RECV_BACKWARD0, which it needs",
    ("F0 SF0 RB0 BW0", "RF0 F0 BW0 SB0 SF0"): "rank 1 runs SEND_FORWARD0, but no operation needs or makes this message",
}


@pytest.mark.parametrize("ranks", LOWERED)
def test_wrong_messages_are_named(ranks):
    with pytest.raises(InvalidSchedule) as error:
        validate(made_of("linear", 2, 1, 1, *ranks))
    assert str(error.value) == f"schedule test: {LOWERED[ranks]}"


def test_both_ends_of_a_channel_agree_on_the_order():
    ranks = ("F0 SF0 F1 SF1 RB0 BW0 RB1 BW1", "RF1 RF0 F0 F1 BW0 SB0 BW1 SB1")
    with pytest.raises(InvalidSchedule, match="rank 0 runs SEND_FORWARD0 where rank 1 runs RECV_FORWARD1"):
        validate(made_of("linear", 2, 1, 2, *ranks))


def test_a_late_send_can_deadlock_what_otherwise_runs():
    late = made_of("linear", 2, 1, 1, "F0 RB0 BW0 SF0", "RF0 F0 BW0 SB0")
    validate(late.without_communication())
    with pytest.raises(
        Deadlock, match=r"^schedule test deadlocks: rank 0 at BW0 waits for SEND_BACKWARD0 of rank 1; rank 1 at F0"
    ):
        validate(late)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(0, 4))
def test_every_possible_order_is_valid(schedule, ahead):
    validate(schedule)
    validate(lower(schedule, ahead))


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(0, 2), st.data())
def test_validation_agrees_with_running(schedule, ahead, data):
    """Swap two operations of a rank: `validate` accepts exactly what a naive executor can run on NCCL's streams."""
    lowered = lower(schedule, ahead)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    ops = list(lowered.ops[rank])
    i = data.draw(st.integers(0, len(ops) - 1))
    j = min(len(ops) - 1, i + data.draw(st.integers(1, 4)))
    ops[i], ops[j] = ops[j], ops[i]
    changed: Schedule = replace(lowered, ops=(*lowered.ops[:rank], tuple(ops), *lowered.ops[rank + 1 :]))
    try:
        validate(changed)
        valid = True
    except InvalidSchedule:
        valid = False
    assert valid == (runs(changed) and stands_nowhere_still(changed))


def stands_nowhere_still(schedule: Schedule) -> bool:
    costs = StageCosts.uniform(schedule.num_stages)
    return len(starts_on_streams(schedule, costs, one_queue=True)) == sum(map(len, schedule.ops))


def test_a_limit_that_is_too_small_can_be_told_to_other_ranks():
    told = pickle.loads(pickle.dumps(Infeasible("rank 0 needs 2", 2.0)))
    assert (str(told), told.smallest_limit) == ("rank 0 needs 2", 2.0)


def test_a_schedule_that_claims_a_billion_microbatches_lacks_some_at_once():
    schedule = replace(generate("zb-h1", 2, 2), num_microbatches=10**9)
    with pytest.raises(InvalidSchedule, match="rank 0 lacks F2"):
        validate(schedule)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(was_enabled):
    try:
        gc.enable() if was_enabled else gc.disable()
        with pytest.raises(InvalidSchedule):
            validate(replace(generate("zb-h1", 2, 2), num_microbatches=3))
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
