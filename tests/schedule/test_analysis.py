from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import (
    Op,
    OpKind,
    StageCosts,
    bubbles,
    critical_path,
    repeat,
    simulate,
    with_post_validation,
)
from megatron.zero_bubble.schedule.analysis import Bubble, by_result, causes, fused_saving
from megatron.zero_bubble.schedule.memory import memory_held, peaks
from tests.schedule.random_schedules import schedules
from tests.schedule.test_lower import made_of


def words(path):
    return " ".join(f"{rank}:{timed.op}" for rank, timed in path)


def test_bubbles_of_a_small_case():
    """Rank 0 waits for B0 from 3 to 32; rank 1 starts at 13, and ends 7 before rank 0."""
    costs = StageCosts((3, 5), (2, 4), (1, 6), (10,), (1, 1), (-1, -1), (0, 0))
    timeline = simulate(made_of("linear", 2, 1, 1, "F0 B0 W0", "F0 B0 W0"), costs)
    assert bubbles(timeline) == (Bubble(0, 0, 29, 0, 0, 0), Bubble(13, 0, 0, 0, 0, 7))


def test_one_f_one_b_waits_where_the_formula_says():
    """Rank r (from 0) of p: its span holds (p-1-r)(F+B+W) of bubble, and all ranks lack (p-1)(F+B+W) together."""
    p, f, b, w = 4, 5, 4, 3
    found = bubbles(simulate(generate("1f1b", p, 8), StageCosts.uniform(p, f, b, w)))
    for rank, bubble in enumerate(found):
        assert (bubble.warmup, bubble.tail) == (rank * f, rank * (b + w))
        assert bubble.within_span == (p - 1 - rank) * (f + b + w)
        assert bubble.total == (p - 1) * (f + b + w)


def test_a_fast_rank_waits_for_forwards():
    costs = StageCosts((9, 1), (1, 1), (1, 1), (0,), (1, 1), (-1, -1), (0, 0))
    assert bubbles(simulate(generate("gpipe", 2, 2), costs))[1] == Bubble(9, 8, 0, 0, 0, 2)


def test_a_pair_sends_after_its_backward():
    timeline = simulate(generate("dualpipe-v", 4, 8), StageCosts.uniform(8, time_comm=0.3), overlap_communication=False)
    for bubble in bubbles(timeline):
        assert min(bubble.waiting_for_forward, bubble.waiting_for_backward, bubble.communication) >= -1e-9
    ends = {rank: timed.end for rank, timed in critical_path(timeline)}
    assert max(ends.values()) == timeline.makespan


def test_communication_that_occupies_the_rank_is_a_cause_of_its_own():
    schedule = made_of("linear", 2, 1, 2, "F0 F1 BW0 BW1", "F0 BW0 F1 BW1")
    timeline = simulate(schedule, StageCosts.uniform(2, 10, 10, 10, 1), overlap_communication=False)
    assert bubbles(timeline)[0] == Bubble(0, 0, 19 + 11, 0, 1 + 2 + 1, 0)


@pytest.mark.parametrize("overlap", [True, False])
def test_waiting_for_validation_is_a_cause_of_its_own(overlap):
    """Rank 0 steps at 9; rank 1, whose W takes 10, steps at 16, and what it knows takes 1 to get to rank 0."""
    ops = "VALIDATE0 F0 B0 W0 STEP0"
    costs = StageCosts((2, 2), (1, 1), (1, 10), (1,), (1, 1), (-1, -1), (0, 0))
    once = made_of("linear", 2, 1, 1, ops, ops)
    timeline = simulate(repeat(once, 2), costs, overlap_communication=overlap)
    first, second = bubbles(timeline)
    assert (first.waiting_for_validation, second.waiting_for_validation) == (8 if overlap else 9, 0)
    assert (first.warmup, second.warmup) == (0, 3)
    path = "0:F0 1:F0 1:B0 1:W0 1:STEP0 0:VALIDATE1 0:F1 1:F1 1:B1 1:W1 1:STEP1"
    assert words(critical_path(timeline)) == path


def test_causes_are_listed_in_words():
    plain = simulate(generate("zb-h1", 4, 8), StageCosts.uniform(4))
    assert causes(plain) == {
        "warmup": (0, 1, 2, 3),
        "waiting for F": (0, 0, 0, 0),
        "waiting for B": (3, 2, 1, 0),
        "communication": (0, 0, 0, 0),
        "tail": (0, 0, 0, 0),
    }
    validated = simulate(with_post_validation(plain.schedule, plain.costs), plain.costs)
    assert causes(validated) == {**causes(plain), "waiting for validation": (0, 0, 0, 0)}


@settings(max_examples=50, deadline=None)
@given(schedules(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 5), st.booleans())
def test_bubbles_add_up_and_the_critical_path_is_a_chain(schedule, f, b, w, comm, overlap):
    costs = StageCosts.uniform(schedule.num_stages, f, b, w, comm)
    timeline = simulate(schedule, costs, overlap_communication=overlap)
    for bubble, span, work in zip(bubbles(timeline), timeline.spans, timeline.work, strict=True):
        parts = (bubble.warmup, bubble.waiting_for_forward, bubble.waiting_for_backward, bubble.communication)
        assert min(*parts, bubble.tail) >= 0
        assert bubble.total == timeline.makespan - work
        assert bubble.within_span == span - work
        assert overlap <= (bubble.communication == 0)
    path = critical_path(timeline)
    assert path[0][1].start == 0
    assert path[-1][1].end == timeline.makespan
    for (rank, before), (next_rank, timed) in pairwise(path):
        gap = timed.start - before.end
        if overlap:
            assert gap == (comm if rank != next_rank else 0)
        else:
            assert gap in ((comm,) if rank != next_rank else (0, comm, 2 * comm))


def test_the_critical_path_of_zb_h1_runs_down_and_up_the_pipeline():
    timeline = simulate(generate("zb-h1", 3, 3), StageCosts.uniform(3, 3, 3, 1))
    assert words(critical_path(timeline)) == "0:F0 1:F0 2:F0 2:B0 2:F1 2:B1 2:F2 2:B2 1:B2 0:B2 0:W2"


def test_a_busy_receiver_is_what_its_next_op_waits_for():
    """F1 is on its way from 6 on, when rank 1 computes until 7: then it takes 2 to receive it."""
    costs = StageCosts((2, 3), (1, 1), (1, 1), (2,), (1, 1), (-1, -1), (0, 0))
    timeline = simulate(generate("gpipe", 2, 2).forward_only(), costs, overlap_communication=False)
    assert [timed.start for timed in timeline.lanes[1]] == [4, 9]
    assert words(critical_path(timeline)) == "0:F0 1:F0 1:F1"


def test_an_empty_timeline_has_no_path_no_bubbles_and_no_cost():
    empty = simulate(made_of("linear", 2, 1, 1, "", ""), StageCosts.uniform(2))
    assert critical_path(empty) == ()
    assert bubbles(empty) == (Bubble(0, 0, 0, 0, 0, 0),) * 2
    assert (empty.cost, empty.makespan, empty.bubble_rate, empty.peak_memory) == (0, 0, 0, (0, 0))


@pytest.mark.parametrize(("name", "op"), [("gpipe", "F7"), ("1f1b", "F3"), ("zb-h2", "F6")])
def test_the_op_that_reaches_the_peak(name, op):
    [first, *_] = peaks(generate(name, 4, 8), StageCosts.uniform(4, memory_f=3, memory_b=-2, memory_w=-1))
    assert str(first.op) == op


def test_memory_while_an_op_runs_and_after():
    costs = StageCosts.uniform(1, memory_f=3, memory_b=-2, memory_w=-1)
    held = memory_held(made_of("linear", 1, 1, 1, "F0 B0 W0"), costs, 0)
    assert [(str(op), during, after) for op, during, after in held] == [("F0", 3, 3), ("B0", 3, 1), ("W0", 1, 0)]


def test_embeddings_ahead_of_the_pipeline_do_not_lengthen_a_span():
    """Rank 1 looks its rows up at time 0 and waits for F0 until 1: that is its warmup, and its span begins then."""
    schedule = generate("zb-h1", 2, 2, vocabulary_parallel=True)
    shard = {"time_e": 0.25, "time_ew": 0.25, "time_s": 0.5, "time_t": 0.25}
    timeline = simulate(schedule, StageCosts.uniform(2).with_shards(schedule.placement, shard))
    lane = timeline.lanes[1]
    first = next(timed for timed in lane if timed.op == Op(OpKind.F, 0))
    embedded = [timed for timed in lane if timed.op.kind is OpKind.E and timed.start < first.start]
    assert embedded
    assert first.start > lane[0].end
    assert timeline.spans[1] == pytest.approx(lane[-1].end - first.start + 0.25 * len(embedded))
    bubble = bubbles(timeline)[1]
    assert bubble.warmup == pytest.approx(first.start - 0.25 * len(embedded))
    assert bubble.total == pytest.approx(timeline.makespan - timeline.work[1])


def test_a_fused_backward_is_half_b_and_half_w_where_no_more_is_known():
    f, b, w, bw = OpKind.F, OpKind.B, OpKind.W, OpKind.BW
    assert by_result({f: 1, bw: 6}) == {f: 1, b: 3, w: 3}
    assert by_result({f: 1, b: 2, w: 5}) == {f: 1, b: 2, w: 5}
    assert by_result({f: 1, b: 2, w: 5, bw: 6}) == {f: 1, b: 2, w: 5}


@pytest.mark.parametrize(("fused", "saved"), [(6, 1), (8, 0), (1, 2.5), (0, 0)])
def test_a_fused_backward_saves_at_most_half_of_w(fused: float, saved: float):
    assert fused_saving(fused, 2, 5) == saved
