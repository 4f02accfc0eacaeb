from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import (
    InvalidSchedule,
    Op,
    OpKind,
    Placement,
    Schedule,
    ScheduleError,
    StageCosts,
    lower,
    validate,
)
from megatron.zero_bubble.schedule.kinds import BACKWARDS, COMMUNICATION, RECEIVES, SENDS
from tests.schedule.random_schedules import runs, schedules

SHORT = {"SF": "SEND_FORWARD", "RF": "RECV_FORWARD", "SB": "SEND_BACKWARD", "RB": "RECV_BACKWARD"}


def parse(text: str) -> tuple[Op, ...]:
    """`RF0.1 F0.1 SF0.1`: short words for the messages."""
    ops = []
    for word in text.split():
        letters = word.rstrip("0123456789.")
        microbatch, _, chunk = word[len(letters) :].partition(".")
        ops.append(Op(OpKind(SHORT.get(letters, letters)), int(microbatch), int(chunk or 0)))
    return tuple(ops)


def made_of(kind: str, num_ranks: int, num_chunks: int, num_microbatches: int, *ranks: str) -> Schedule:
    placement = Placement(kind, num_ranks, num_chunks)
    return Schedule("test", placement, num_microbatches, tuple(map(parse, ranks)))


def test_one_f_one_b_on_two_ranks():
    assert lower(generate("1f1b", 2, 2), receive_ahead=1).ops == (
        parse("F0 SF0 RB0 F1 SF1 RB1 BW0 BW1"),
        parse("RF0 F0 RF1 BW0 SB0 F1 BW1 SB1"),
    )


def test_receive_ahead_counts_compute_ops():
    schedule = generate("gpipe", 2, 3)
    assert lower(schedule, receive_ahead=0).ops[1] == parse("RF0 F0 RF1 F1 RF2 F2 BW0 SB0 BW1 SB1 BW2 SB2")
    assert lower(schedule, receive_ahead=1).ops[1] == parse("RF0 RF1 F0 RF2 F1 F2 BW0 SB0 BW1 SB1 BW2 SB2")
    with pytest.raises(ScheduleError, match="receive_ahead"):
        lower(schedule, receive_ahead=-1)


def test_a_receive_is_posted_once_the_message_before_it_on_its_channel_is_made():
    """At once after RB0, RB1 would hold up F1, which rank 1 needs before it makes the gradient of microbatch 0."""
    assert lower(generate("gpipe", 2, 3), receive_ahead=2).ops == (
        parse("F0 SF0 RB0 F1 SF1 F2 SF2 RB1 BW0 RB2 BW1 BW2"),
        parse("RF0 RF1 F0 RF2 F1 F2 BW0 SB0 BW1 SB1 BW2 SB2"),
    )


def test_a_receive_is_posted_before_the_next_message_of_its_channel_is_made():
    """Posted right before F3, RF3 would leave SF4 waiting, and rank 0 behind it, which is to post RB1."""
    planned = made_of(
        "linear",
        2,
        1,
        5,
        "F0 F1 F2 F3 B0 W0 F4 B1 B2 W1 B3 W2 W3 B4 W4",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4",
    )
    validate(lower(planned, receive_ahead=0))


def test_first_receives_at_one_place_go_by_source_rank():
    middle = made_of("linear", 3, 1, 2, "F0 F1 BW0 BW1", "F0 BW0 F1 BW1", "F0 BW0 F1 BW1")
    assert lower(middle, receive_ahead=1).ops[1] == parse("RF0 RB0 F0 SF0 RF1 BW0 SB0 RB1 F1 SF1 BW1 SB1")


def test_the_turn_of_a_v_needs_no_message():
    v = made_of("v", 2, 2, 1, "F0 F0.1 BW0.1 BW0", "F0 F0.1 BW0.1 BW0")
    assert lower(v, receive_ahead=0).ops == (
        parse("F0 SF0 RF0.1 F0.1 BW0.1 SB0.1 RB0 BW0"),
        parse("RF0 F0 F0.1 SF0.1 RB0.1 BW0.1 BW0 SB0"),
    )


def test_a_channel_carries_both_directions_in_the_order_of_its_source():
    """Two ranks, interleaved: rank 1 sends activations of chunk 0 and gradients of chunk 1 to rank 0."""
    wrapped = made_of("interleaved", 2, 2, 1, "F0 F0.1 BW0.1 BW0", "F0 F0.1 BW0.1 BW0")
    assert lower(wrapped, receive_ahead=0).ops == (
        parse("F0 SF0 RF0.1 F0.1 SF0.1 RB0.1 BW0.1 SB0.1 RB0 BW0"),
        parse("RF0 F0 SF0 RF0.1 F0.1 BW0.1 SB0.1 RB0 BW0 SB0"),
    )


def test_channel_order_pulls_a_receive_forward():
    """Rank 0 sends F1 before F0, rank 1 uses F0 first: the receive of F1 has to be posted before F0."""
    crossed = made_of("linear", 2, 1, 2, "F1 F0", "F0 F1")
    assert lower(crossed, receive_ahead=0).ops[1] == parse("RF1 RF0 F0 F1")


def test_forward_only_schedules_have_no_backward_messages():
    lowered = lower(generate("zb-h1", 3, 2).forward_only(), receive_ahead=0)
    assert lowered.ops[1] == parse("RF0 F0 SF0 RF1 F1 SF1")


def test_a_single_rank_needs_no_communication():
    assert not lower(generate("1f1b", 1, 3)).is_lowered
    assert not lower(made_of("interleaved", 1, 2, 1, "F0 F0.1 BW0.1 BW0")).is_lowered


def test_tensors_without_a_maker_or_a_user_are_refused():
    with pytest.raises(InvalidSchedule, match="rank 0 makes F1, but rank 1 never uses it"):
        lower(made_of("linear", 2, 1, 2, "F0 F1", "F0"))
    with pytest.raises(InvalidSchedule, match="rank 1 needs RECV_FORWARD1 for F1, but rank 0 never makes it"):
        lower(made_of("linear", 2, 1, 2, "F0", "F0 F1"))


def test_a_missing_message_names_the_operation_of_a_pair_that_needs_it():
    """Both operations of a pair take one position of their rank."""
    schedule = generate("dualpipe-v", 2, 4)
    rank, missing = 1, Op(OpKind.F, 3, 0)
    assert missing in schedule.ops[0]
    without = [tuple(op for op in schedule.ops[0] if op != missing), schedule.ops[1]]
    with pytest.raises(InvalidSchedule, match=f"rank {rank} needs RECV_FORWARD3 for F3, but rank 0 never makes it"):
        lower(replace(schedule, ops=tuple(without)))


@settings(max_examples=100, deadline=None)
@given(schedules(), st.integers(0, 4), st.booleans())
def test_lowering_any_schedule(schedule, ahead, forward_only):
    if forward_only:
        schedule = replace(schedule.forward_only(), name="random")
    lowered = lower(schedule, ahead)
    assert lowered.without_communication() == schedule
    assert lower(lowered, ahead) == lowered
    assert forward_only or runs(lowered)
    for ops in lowered.ops:
        check_sends(ops)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "v-half"])
def test_a_receive_keeps_its_distance_where_nothing_speaks_against_it(name, ahead):
    lowered = lower(generate(name, 4, 8), ahead)
    for rank in range(4):
        check_receives(lowered, rank, ahead)


def check_sends(ops: tuple[Op, ...]) -> None:
    for before, op in zip((None, *ops[:-1]), ops, strict=True):
        if op.kind in SENDS:
            makers = {OpKind.F} if op.kind is OpKind.SEND_FORWARD else BACKWARDS
            assert before is not None
            assert before.kind in makers
            assert before[1:] == op[1:]


def check_receives(schedule: Schedule, rank: int, ahead: int) -> None:
    """Each receive is as late as `ahead` allows, unless the next one on its channel could not be later."""
    ops = schedule.ops[rank]
    slot = 0  # compute ops before the receive
    consumer = {op: i for i, op in enumerate(op for op in ops if op.kind not in COMMUNICATION)}
    posted: dict[int, list[tuple[int, int]]] = {}
    for op in ops:
        if op.kind in RECEIVES:
            users = [OpKind.F] if op.kind is OpKind.RECV_FORWARD else [OpKind.B, OpKind.BW]
            [use] = [consumer[op._replace(kind=kind)] for kind in users if op._replace(kind=kind) in consumer]
            posted.setdefault(schedule.placement.peer_of(rank, op), []).append((slot, max(0, use - ahead)))
        elif op.kind not in SENDS:
            slot += 1
    for messages in posted.values():
        for k, (position, wanted) in enumerate(messages):
            assert position == min(wanted, *(later for later, _ in messages[k + 1 :]), wanted)


def test_costs_of_other_stages_are_refused():
    with pytest.raises(ScheduleError, match=r"^schedule zb-v has 8 stages, but the costs are for 4$"):
        lower(generate("zb-v", 4, 8), costs=StageCosts.uniform(4))
