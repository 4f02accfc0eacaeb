from __future__ import annotations

import json
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.microbatch_order import _Step
from megatron.zero_bubble.schedule import Deadlock, Idle, ScheduleError, StageCosts, lower, simulate
from tests.schedule.random_schedules import schedules
from tests.schedule.test_lower import made_of

PAPER = json.loads((Path(__file__).parents[1] / "planner" / "zero_bubble_paper.json").read_text())
times = st.integers(1, 50)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("row", PAPER["bubble_rates"], ids=lambda row: f"{row['model']}-{row['num_microbatches']}")
def test_published_rates_to_the_last_digit(row, name):
    ranks, microbatches = row["num_stages"], row["num_microbatches"]
    costs = StageCosts.uniform(ranks, *(Fraction(str(row["time_ms"][key])) for key in ("F", "B", "W", "comm")))
    rate = simulate(generate(name, ranks, microbatches), costs).bubble_rate
    assert round(float(rate), 4) == row["bubble_rate"][name]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12), times, times, times)
def test_bubble_of_fused_schedules(name, p, m, f, b, w):
    timeline = simulate(generate(name, p, m), StageCosts.uniform(p, Fraction(f), Fraction(b), Fraction(w)))
    assert timeline.cost - m * (f + b + w) == (p - 1) * (f + b + w)
    assert timeline.bubble_rate == Fraction(p - 1, m + p - 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), times, times, st.data())
def test_the_bubble_of_zb_h1_is_that_of_its_formula(p, more, f, b, data):
    w = data.draw(st.integers(1, f))
    m = p + more
    assert simulate(generate("zb-h1", p, m), StageCosts.uniform(p, f, b, w)).cost == (
        m * (f + b + w) + (p - 1) * (f + b - w)
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), times, times, st.data())
def test_the_bubble_of_zb_h2_is_that_of_its_formula(p, more, f, b, data):
    w = data.draw(st.integers(1, f))
    comm = data.draw(st.integers(0, min(f, b) // 2))
    m = 2 * p - 1 + more
    assert simulate(generate("zb-h2", p, m), StageCosts.uniform(p, f, b, w, comm)).cost == (
        m * (f + b + w) + max(0, (p - 1) * (f + b + 2 * comm - 2 * w))
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.data(), times, times)
def test_zb_h1_is_optimal_when_microbatches_are_fewer_than_ranks(p, data, f, b):
    m, w = data.draw(st.integers(1, p)), data.draw(st.integers(1, f))
    cost = simulate(generate("zb-h1", p, m), StageCosts.uniform(p, f, b, w)).cost
    assert cost == max(m * (f + b + w), (m + p - 1) * (f + b) + w)


def test_starts_and_ends_of_a_small_case():
    """Two ranks, unequal stages, one edge: every number by hand."""
    costs = StageCosts((3, 5), (2, 4), (1, 6), (10,), (1, 1), (-1, -1), (0, 0))
    timeline = simulate(made_of("linear", 2, 1, 1, "F0 B0 W0", "F0 B0 W0"), costs)
    assert [(str(op), start, end) for op, start, end in timeline.lanes[0]] == [
        ("F0", 0, 3),
        ("B0", 32, 34),
        ("W0", 34, 35),
    ]
    assert [(str(op), start, end) for op, start, end in timeline.lanes[1]] == [
        ("F0", 13, 18),
        ("B0", 18, 22),
        ("W0", 22, 28),
    ]
    assert timeline.spans == (35, 15)
    assert (timeline.cost, timeline.makespan, timeline.work) == (35, 35, (6, 15))
    assert timeline.bubble_rate == 20 / 35, "the work of the busiest rank counts"
    assert timeline.idle == Idle(imbalance=(15 - 6) / (2 * 35), bubble=20 / 35)
    assert timeline.idle.total == pytest.approx(1 - (6 + 15) / (2 * 35)), "all work counts"


def test_idle_says_what_a_stage_that_is_too_long_costs_the_other_ranks():
    """The last of two ranks is longer, because it has the output layer: it hardly waits, but the first one does."""
    work = (670, 819)
    first, last = (Fraction(one, 8 * 3) for one in work)
    costs = StageCosts(*((first, last),) * 3, (0,), (1, 1), (-1, -1), (0, 0))
    timeline = simulate(generate("auto", 2, 8, costs=costs, memory_limit=4), costs)
    assert timeline.work == work
    assert timeline.bubble_rate < 0.01
    assert timeline.idle.imbalance == (819 - Fraction(670 + 819, 2)) / timeline.cost > 0.09
    assert timeline.idle.total == timeline.idle.imbalance + timeline.bubble_rate == 1 - sum(work) / (2 * timeline.cost)
    even = simulate(generate("1f1b", 2, 8), StageCosts.uniform(2))
    assert even.idle == Idle(imbalance=0, bubble=even.bubble_rate)


def test_communication_that_does_not_overlap_occupies_both_ranks():
    costs = StageCosts.uniform(2, 10, 10, 10, 1)
    schedule = made_of("linear", 2, 1, 2, "F0 F1 BW0 BW1", "F0 BW0 F1 BW1")
    lanes = simulate(schedule, costs, overlap_communication=False).lanes
    assert [start for _, start, _ in lanes[0]] == [0, 11, 42, 74]
    assert [start for _, start, _ in lanes[1]] == [11, 21, 43, 53]
    lanes = simulate(schedule, costs).lanes
    assert [start for _, start, _ in lanes[0]] == [0, 10, 42, 72]
    assert [start for _, start, _ in lanes[1]] == [11, 21, 41, 51]


def test_the_makespan_is_longer_than_the_cost_when_ranks_are_shifted():
    timeline = simulate(generate("zb-h2", 4, 8), StageCosts.uniform(4))
    assert timeline.cost == 24
    assert timeline.bubble_rate == 0
    assert timeline.makespan == 27


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 20])
def test_peak_memory_of_the_published_schedules(m):
    p, full, after_b = 4, 10, 3
    costs = StageCosts.uniform(p, memory_f=full, memory_b=after_b - full, memory_w=-after_b)

    def peaks(name):
        return simulate(generate(name, p, m), costs).peak_memory

    workers = range(1, p + 1)
    assert peaks("gpipe") == (m * full,) * p
    assert peaks("1f1b") == tuple(min(m, p - i + 1) * full for i in workers)
    h1 = [(p - i + 1) * full + (i - 1) * after_b for i in workers]
    h2 = [(2 * p - 2 * i + 1) * full + (2 * i - 2) * after_b for i in workers]
    for name, published in (("zb-h1", h1), ("zb-h2", h2)):
        assert all(peak <= limit for peak, limit in zip(peaks(name), published, strict=True))
        assert all(peak <= m * full for peak in peaks(name))
    if m >= p:
        assert peaks("zb-h1") == tuple(h1)
    if m >= 2 * p - 1:
        assert peaks("zb-h2") == tuple(h2)


def test_memory_that_b_allocates_counts_while_it_runs():
    costs = StageCosts.uniform(1, memory_f=1, memory_b=2, memory_w=-3)
    assert simulate(made_of("linear", 1, 1, 1, "F0 B0 W0"), costs).peak_memory == (3,)


@settings(max_examples=50, deadline=None)
@given(schedules(), st.data(), st.booleans())
def test_any_schedule_keeps_order_and_dependencies(schedule, data, overlap):
    n = schedule.num_stages
    draw = [tuple(data.draw(st.lists(times, min_size=n, max_size=n))) for _ in range(3)]
    comm = tuple(data.draw(st.lists(st.integers(0, 9), min_size=n - 1, max_size=n - 1)))
    costs = StageCosts(*draw, comm, (1,) * n, (-1,) * n, (0,) * n)
    timeline = simulate(lower(schedule), costs, overlap_communication=overlap)
    assert timeline.lanes == simulate(schedule, costs, overlap_communication=overlap).lanes
    when = {}
    for rank, lane in enumerate(timeline.lanes):
        assert tuple(timed.op for timed in lane) == schedule.ops[rank]
        free = 0
        for op, start, end in lane:
            stage = schedule.placement.stage_of(rank, op.chunk)
            assert start >= free
            assert end - start == costs.times[op.kind][stage]
            free = end
            when[op.kind.value[0], stage, op.microbatch] = (start, end, rank)
    for (kind, stage, microbatch), (start, _, rank) in when.items():
        before = {"F": ("F", stage - 1), "B": ("B", stage + 1), "W": ("B", stage)}[kind]
        if (*before, microbatch) in when:
            _, end, source = when[(*before, microbatch)]
            assert start >= end + (comm[min(stage, before[1])] if source != rank else 0)


def test_costs_for_other_stages_and_endless_waits_are_refused():
    with pytest.raises(ScheduleError, match="4 stages, but the costs are for 3"):
        simulate(generate("1f1b", 4, 4), StageCosts.uniform(3))
    with pytest.raises(Deadlock, match="rank 0 at BW0"):
        simulate(made_of("linear", 2, 1, 2, "F0 BW0 F1 BW1", "F0 F1 BW0 BW1"), StageCosts.uniform(2))


def test_a_forward_only_schedule_has_a_bubble():
    timeline = simulate(generate("1f1b", 4, 8).forward_only(), StageCosts.uniform(4))
    assert (timeline.cost, timeline.makespan) == (8, 11)
    assert timeline.bubble_rate == 0


LENGTHS = (0.5, 2.0, 0.25, 1.25)


@pytest.mark.parametrize(
    ("name", "recompute"), [("1f1b", "none"), ("zb-2p", "none"), ("auto", "planned"), ("1f1b", "full")]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_lengths_of_microbatches_scale_their_times_and_memory(name: str, recompute: str, overlap: bool):
    """As costs of their own for every microbatch do."""
    costs = replace(StageCosts.uniform(3, 2.0, 3.0, 1.0, 0.1, 4.0, -1.0, -3.0), time_r=(1.5,) * 3, memory_r=(3.0,) * 3)
    schedule = generate(
        name, 3, 4, costs=costs, recompute=recompute, memory_limit=7.0 if recompute == "planned" else None
    )
    times = [
        field.name for field in fields(costs) if field.name[:5] in ("time_", "memor") and field.name != "time_comm"
    ]
    each = [
        replace(costs, **{name: tuple(value * length for value in getattr(costs, name)) for name in times})
        for length in LENGTHS
    ]
    timeline = simulate(schedule, costs, overlap_communication=overlap, lengths=LENGTHS)
    step = _Step(schedule, each, (), interlocks=False, overlap_communication=overlap)
    assert timeline.makespan == pytest.approx(step.time((0, 1, 2, 3)))
    assert timeline.peak_memory == pytest.approx(step.peaks((0, 1, 2, 3)))
    assert [peak.amount for peak in timeline.peaks] == pytest.approx(timeline.peak_memory)
    widths = {timed.op.microbatch: timed.end - timed.start for timed in timeline.lanes[0] if timed.op.kind == "F"}
    assert widths == pytest.approx({k: 2.0 * length for k, length in enumerate(LENGTHS)})
    assert timeline.work[1] == pytest.approx(sum(t.end - t.start for t in timeline.lanes[1]))


def test_lengths_are_those_of_all_microbatches():
    with pytest.raises(ScheduleError, match=r"^schedule 1f1b has 4 microbatches, but 3 have a length$"):
        simulate(generate("1f1b", 3, 4), StageCosts.uniform(3), lengths=(1.0, 1.0, 1.0))
