from __future__ import annotations

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import Op, OpKind, Placement, Schedule, ScheduleError, lower


def test_an_op_prints_as_kind_microbatch_and_chunk():
    assert str(Op(OpKind.F, 3)) == "F3"
    assert str(Op(OpKind.B, 3, 1)) == "B3.1"
    assert str(Op(OpKind.RECV_BACKWARD, 12, 2)) == "RECV_BACKWARD12.2"


@pytest.mark.parametrize(
    ("placement", "grid"),
    [
        (Placement("linear", 3), [[0], [1], [2]]),
        (Placement("interleaved", 3, 2), [[0, 3], [1, 4], [2, 5]]),
        (Placement("v", 3, 2), [[0, 5], [1, 4], [2, 3]]),
        (Placement("v", 2, 3), [[0, 3, 4], [1, 2, 5]]),
    ],
)
def test_placements_map_stages_to_ranks_and_chunks(placement, grid):
    for rank, stages in enumerate(grid):
        for chunk, stage in enumerate(stages):
            assert placement.stage_of(rank, chunk) == stage
            assert placement.rank_of(stage) == rank
            assert placement.chunk_of(stage) == chunk


def test_the_peer_of_a_message_is_the_rank_of_the_neighbouring_stage():
    v = Placement("v", 3, 2)
    assert v.peer_of(0, Op(OpKind.SEND_FORWARD, 0, 0)) == 1
    assert v.peer_of(0, Op(OpKind.RECV_FORWARD, 0, 1)) == 1
    assert v.peer_of(2, Op(OpKind.SEND_FORWARD, 0, 0)) == 2, "the turn of the V stays on its rank"
    wrapped = Placement("interleaved", 3, 2)
    assert wrapped.peer_of(2, Op(OpKind.SEND_FORWARD, 0, 0)) == 0
    assert wrapped.peer_of(0, Op(OpKind.SEND_BACKWARD, 0, 1)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag", 2), "unknown"),
        (("linear", 0), "at least one rank"),
        (("v", 2, 0), "at least one rank"),
        (("v", 2, 1), "at least two chunks a rank, got 1: use linear"),
        (("linear", 2, 2), "one chunk"),
    ],
)
def test_impossible_placements_are_refused(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        Placement(*arguments)


def test_a_schedule_needs_ops_for_every_rank():
    with pytest.raises(ScheduleError, match="1 ranks"):
        Schedule("short", Placement("linear", 2), 1, ((Op(OpKind.F, 0),),))


def test_what_a_schedule_says_about_itself():
    schedule = generate("zb-h1", 2, 3)
    assert schedule.splits_backward
    assert not generate("1f1b", 2, 3).splits_backward
    assert not schedule.is_lowered
    assert lower(schedule).is_lowered
    assert lower(schedule).without_communication() == schedule
    assert [str(op) for op in schedule.forward_only().ops[0]] == ["F0", "F1", "F2"]


def test_an_excerpt_shows_the_surroundings_of_an_op():
    schedule = generate("gpipe", 2, 4)
    assert schedule.excerpt(1, 4, radius=1) == "rank 1: ... F3 [BW0] BW1 ..."
    assert schedule.excerpt(0, 0, radius=1) == "rank 0: [F0] F1 ..."
    assert schedule.excerpt(0, 7, radius=1) == "rank 0: ... BW2 [BW3]"
