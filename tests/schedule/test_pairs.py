"""Pairs: an F and the &B right after it run as one, each computing while the other exchanges tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megatron.zero_bubble.schedule import InvalidSchedule, Op, Placement, Schedule, lower, simulate, validate
from megatron.zero_bubble.schedule.analysis import bubbles, critical_path
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.draw import to_svg
from megatron.zero_bubble.schedule.errors import Deadlock, ScheduleError
from megatron.zero_bubble.schedule.formats import (
    schedule_from_json,
    schedule_from_pytorch_csv,
    schedule_to_json,
    schedule_to_pytorch_csv,
)
from megatron.zero_bubble.schedule.generators.dualpipe_v import dualpipe_v
from megatron.zero_bubble.schedule.generators.interleaved import interleaved_pairs
from megatron.zero_bubble.schedule.pairs import apart, check_pairs, half_apart, in_pairs, pairs
from megatron.zero_bubble.schedule.step_ops import with_post_validation
from megatron.zero_bubble.schedule.streams import HardwareQueues

COSTS = StageCosts.uniform(2, 10, 10, 10, time_comm=1, all_to_all_f=3, all_to_all_b=4)
LINES = ("F0 F1 F2 &B0 W0 B1 B2 W1 W2", "F0 F1 &B0 F2 &B1 W0 B2 W1 W2")


def schedule_of(*lines, placement=None, num_microbatches=3):
    ops = tuple(tuple(map(Op.parse, line.split())) for line in lines)
    return Schedule("pairs", placement or Placement("linear", len(lines)), num_microbatches, ops)


def test_a_pair_takes_the_computing_of_both_and_hides_their_exchanges():
    assert COSTS.time_of_pair(0, Op.parse("&B0").kind, 1) == 10 + 10 - 3 - 4
    assert COSTS.time_of_pair(0, Op.parse("&BW0").kind, 1) == 10 + 20 - 3 - 4


def test_a_pair_takes_as_long_as_its_exchanges_if_these_are_longer():
    slow = StageCosts.uniform(2, 10, 10, 10, all_to_all_f=9, all_to_all_b=8)
    assert slow.time_of_pair(0, Op.parse("&B0").kind, 0) == 17


def test_a_pair_waits_for_both_inputs_and_has_both_results_at_its_end():
    first, second = simulate(schedule_of(*LINES), COSTS).lanes
    assert [(str(op), start, end) for op, start, end in second[:4]] == [
        ("F0", 11, 21),
        ("F1", 21, 21),
        ("&B0", 21, 34),
        ("F2", 49, 49),  # rank 0 has made it in its pair, which ends at 48
    ]
    assert [(str(op), start, end) for op, start, end in first[2:4]] == [("F2", 20, 20), ("&B0", 35, 48)]


def test_work_counts_a_pair_once():
    timeline = simulate(schedule_of(*LINES), COSTS)
    assert timeline.work == (2 * 10 + 13 + 2 * 10 + 3 * 10, 10 + 2 * 13 + 10 + 3 * 10)
    assert [sum(end - start for _, start, end in lane) for lane in timeline.lanes] == list(timeline.work)
    assert [bubble.total + work for bubble, work in zip(bubbles(timeline), timeline.work, strict=True)] == [
        timeline.makespan
    ] * 2


def test_the_critical_path_goes_from_a_forward_through_the_end_of_its_pair():
    path = [(rank, str(timed.op)) for rank, timed in critical_path(simulate(schedule_of(*LINES), COSTS))]
    assert (0, "&B0") in path
    assert (1, "F2") in path


@pytest.mark.parametrize("queues", HardwareQueues)
def test_a_lowered_pair_receives_before_and_sends_after(queues):
    lowered = lower(schedule_of(*LINES), costs=COSTS)
    validate(lowered)
    for ops in lowered.ops:
        check = [(str(before), str(op)) for before, op in pairwise(ops) if str(op).startswith("&")]
        assert check
        assert all(before.startswith("F") for before, _ in check)
    assert simulate(lowered, COSTS, hardware_queues=queues).makespan == simulate(schedule_of(*LINES), COSTS).makespan


def test_post_validation_does_not_part_a_pair():
    check_pairs(with_post_validation(schedule_of("F0 F1 &B0 W0 B1 W1", num_microbatches=2), StageCosts.uniform(1)), 0)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (("F0 F1 B0 &B1 W0 W1",), "rank 0 runs &B1 without F right before it"),
        (("F0 &B0 F1 B1 W0 W1",), "rank 0 runs &B0 before F0, which it needs"),
    ],
)
def test_a_pair_of_operations_that_cannot_run_as_one_is_refused(lines, problem):
    with pytest.raises(InvalidSchedule, match=problem):
        validate(schedule_of(*lines, num_microbatches=2))


def test_a_pair_that_waits_for_itself_through_another_rank_is_a_deadlock():
    with pytest.raises(Deadlock, match="rank 0 at &B0 waits for B0 of stage 1"):
        validate(schedule_of("F0 F1 &B0 W0 B1 W1", "F0 F1 B0 W0 B1 W1", num_microbatches=2))


def test_formats_keep_pairs():
    schedule = schedule_of(*LINES)
    assert schedule_from_json(schedule_to_json(schedule)).ops == schedule.ops
    text = schedule_to_pytorch_csv(schedule)
    assert "(1F1;1I0)OVERLAP_F_B" in text
    assert schedule_from_pytorch_csv(text).ops == schedule.ops


def test_torch_reads_the_pairs_of_the_csv():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = [line.split(",") for line in schedule_to_pytorch_csv(schedule_of(*LINES)).splitlines()]
    actions = [schedules._Action.from_str(cell) for cell in rows[1]]
    overlapped = [action for action in actions if action.computation_type is schedules.OVERLAP_F_B]
    assert [tuple(map(str, action.sub_actions)) for action in overlapped] == [("1F1", "1I0"), ("1F2", "1I1")]


def test_pairs_are_made_and_taken_apart():
    schedule = schedule_of(*LINES)
    chosen = [frozenset(Op.parse(str(op)[1:]) for op in ops if str(op).startswith("&")) for ops in schedule.ops]
    assert in_pairs(apart(schedule), chosen) == schedule


def test_a_picture_shows_both_operations_of_a_pair_one_above_the_other():
    svg = to_svg(simulate(schedule_of(*LINES), COSTS))
    assert ">F2<" in svg
    assert ">B1<" in svg
    assert ">&amp;B1<" not in svg


def test_more_exchange_than_time_is_refused():
    with pytest.raises(ScheduleError, match="all_to_all_f must be a part of time_f, got 11 of 10"):
        StageCosts.uniform(1, 10, 10, 10, all_to_all_f=11)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_chunks", [2, 3])
def test_megatrons_pairs_run_for_every_number_of_whole_groups(num_ranks, num_chunks):
    for groups in (1, 2, 3):
        schedule = interleaved_pairs(num_ranks, groups * num_ranks, num_chunks=num_chunks)
        validate(lower(schedule))
    with pytest.raises(ScheduleError, match="needs whole groups of microbatches: 7 are not a multiple of 4"):
        interleaved_pairs(4, 7, num_chunks=num_chunks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_dualpipe_v_has_the_published_bubble_and_memory(num_ranks):
    """(p-1)(FB + BW - 3W) with times of a chunk, where a pair takes FB, both gradients BW, and F as long as B."""
    num_microbatches, f, w, exchange = 3 * num_ranks, 10, 6, 3
    schedule = dualpipe_v(num_ranks, num_microbatches)
    validate(lower(schedule))
    costs = StageCosts.uniform(
        2 * num_ranks, f, f, w, memory_f=1, memory_b=-1, memory_w=0, all_to_all_f=exchange, all_to_all_b=exchange
    )
    timeline = simulate(schedule, costs)
    together, both = 2 * f + w - 2 * exchange, f + w
    assert timeline.makespan - max(timeline.work) <= (num_ranks - 1) * (together + both - 3 * w)
    assert max(timeline.peak_memory) == 2 * num_ranks + 1
    with pytest.raises(ScheduleError, match=f"needs at least {2 * num_ranks} microbatches"):
        dualpipe_v(num_ranks, 2 * num_ranks - 1)


@pytest.mark.parametrize("schedule", [dualpipe_v(4, 12), interleaved_pairs(4, 12, num_chunks=2), schedule_of(*LINES)])
def test_half_of_the_pairs_apart_runs_every_operation_of_a_chunk_alone_and_keeps_pairs(schedule):
    half = half_apart(schedule)
    assert apart(half) == apart(schedule)
    validate(lower(half))
    for lane, whole in zip(half.ops, schedule.ops, strict=True):
        kept = {op for pair in pairs(lane) for op in pair}
        assert {(op.kind.value[-1], op.chunk) for op in lane if op not in kept} >= {
            (op.kind.value[-1], op.chunk) for op in kept
        }
        assert 0 < 2 * len(list(pairs(lane))) <= len(list(pairs(whole))) + 2
