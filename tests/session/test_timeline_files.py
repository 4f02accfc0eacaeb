"""The files of a measured timeline."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import (
    Op,
    OpKind,
    Placement,
    Schedule,
    StageCosts,
    TimedOp,
    Timeline,
    simulate,
    with_post_validation,
)
from megatron.zero_bubble.schedule.draw import to_svg
from megatron.zero_bubble.schedule.recomputation import Recompute
from megatron.zero_bubble.session.timeline_files import idle_table, measured_timeline, write_timeline

PROFILED = StageCosts.uniform(3, 9, 9, 9, time_comm=0.5, memory_f=6, memory_b=-2, memory_w=-4)
LATE = 1000.0
"""The time at which the drawn step began on the ranks' clock."""


def ran(name: str, slowness: float = 1.25) -> Timeline:
    """A step that ran as planned with F, B, W of 2, 3, 1 ms, but slower, measured on a clock that ran before."""
    schedule = generate(name, 3, 4)
    planned = simulate(schedule, StageCosts.uniform(3, 2, 3, 1))
    lanes = [
        [TimedOp(op, LATE + slowness * start, LATE + slowness * end) for op, start, end in lane]
        for lane in planned.lanes
    ]
    return measured_timeline(schedule, lanes, PROFILED)


def of_pairs(line: str) -> Schedule:
    """A schedule of three microbatches on one rank; `&` marks the backward of a pair."""
    return Schedule("pairs", Placement("linear", 1), 3, (tuple(map(Op.parse, line.split())),))


def test_time_begins_with_the_first_operation():
    timeline = ran("zb-h1")
    assert timeline.lanes[0][0].start == 0
    assert timeline.makespan == pytest.approx(
        1.25 * simulate(timeline.schedule, StageCosts.uniform(3, 2, 3, 1)).makespan
    )


def test_the_plan_beside_it_has_the_times_of_that_step_and_the_messages_and_memory_of_the_profile():
    costs = ran("zb-h1").costs
    assert costs.time_f == pytest.approx((2.5,) * 3)
    assert costs.time_b == pytest.approx((3.75,) * 3)
    assert costs.time_w == pytest.approx((1.25,) * 3)
    assert (costs.time_comm, costs.memory_f, costs.memory_b) == ((0.5, 0.5), (6, 6, 6), (-2, -2, -2))


def test_the_plan_beside_a_step_of_different_lengths_has_the_widths_that_were_measured():
    schedule, lengths = generate("zb-h1", 3, 4), (0.5, 2.0, 0.75, 0.75)
    ran = simulate(schedule, StageCosts.uniform(3, 2, 3, 1), lengths=lengths)
    timeline = measured_timeline(schedule, ran.lanes, replace(PROFILED, time_comm=(0, 0)), shapes_vary=True)
    assert timeline.lengths == pytest.approx(lengths)
    planned = simulate(timeline.schedule, timeline.costs, lengths=timeline.lengths)
    assert planned.makespan == pytest.approx(ran.makespan)
    assert timeline.peak_memory == pytest.approx(simulate(schedule, PROFILED, lengths=lengths).peak_memory)


def test_a_fused_backward_counts_half_and_half():
    costs = ran("1f1b").costs
    assert costs.time_b == costs.time_w == pytest.approx((2.5,) * 3)


def test_fused_and_separate_backwards_have_their_measured_times():
    costs = StageCosts.uniform(2, 2, 2, 2, saved_bw=0.2, time_comm=0.1)
    schedule = generate("auto", 2, 8, costs=costs)
    assert {OpKind.B, OpKind.W, OpKind.BW} <= schedule.kinds
    planned = simulate(schedule, costs)
    # The saving of the profile, measured in other iterations, exceeds W.
    profiled = StageCosts.uniform(2, 9, 9, 9, saved_bw=4, time_comm=0.1)
    timeline = measured_timeline(schedule, planned.lanes, profiled)
    assert simulate(schedule, timeline.costs).makespan == pytest.approx(planned.makespan)


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("line", ["F0 F1 B0 F2 &B1 W0 W1 B2 W2", "F0 F1 &BW0 F2 &BW1 BW2"])
def test_operations_that_run_alone_have_their_measured_times_beside_pairs(line: str, profiled: bool):
    schedule = of_pairs(line)
    costs = StageCosts.uniform(1, 2, 3, 1, all_to_all_f=0.75, all_to_all_b=1)
    lanes = simulate(schedule, costs).lanes
    timeline = measured_timeline(schedule, lanes, costs if profiled else None)
    assert timeline.costs.time_f == costs.time_f
    assert sum(costs.times[OpKind.BW]) == pytest.approx(sum(timeline.costs.times[OpKind.BW]))
    if profiled:
        assert simulate(schedule, timeline.costs).makespan == pytest.approx(timeline.makespan)


def test_a_step_of_pairs_alone_is_drawn_with_the_times_of_the_profile_or_with_half_of_each_pair():
    schedule = of_pairs("F0 F1 &BW0 F2 &BW1 BW2")
    costs = StageCosts.uniform(1, 2, 3, 3, all_to_all_f=0.75, all_to_all_b=1, saved_bw=0.5)
    timed = simulate(schedule, costs).lanes[0][1:-1]
    known = measured_timeline(schedule, [timed], costs).costs
    assert known.saved_bw == costs.saved_bw
    assert (known.time_f, known.time_b, known.time_w) == (costs.time_f, costs.time_b, costs.time_w)
    alone = measured_timeline(schedule, [timed], None).costs
    assert alone.time_of_pair(0, OpKind.PBW, 0) == pytest.approx(costs.time_of_pair(0, OpKind.PBW, 0))


def test_a_step_of_pairs_on_varied_lengths_is_drawn_without_the_lengths():
    """They are not simulated together."""
    schedule = of_pairs("F0 F1 &BW0 F2 &BW1 BW2")
    costs = StageCosts.uniform(1, 2, 3, 3, all_to_all_f=0.75, all_to_all_b=1)
    timeline = measured_timeline(schedule, simulate(schedule, costs).lanes, costs, shapes_vary=True)
    assert timeline.lengths == ()
    assert simulate(timeline.schedule, timeline.costs, lengths=timeline.lengths).makespan > 0


def test_an_exchange_is_never_longer_than_the_forward_that_contains_it():
    schedule = generate("zb-h1", 3, 4)
    profiled = replace(PROFILED, time_comm=(0, 0), all_to_all_f=(5, 5, 5), all_to_all_b=(1, 1, 1))
    costs = measured_timeline(schedule, simulate(schedule, StageCosts.uniform(3, 2, 3, 1)).lanes, profiled).costs
    assert (costs.all_to_all_f, costs.all_to_all_b) == ((2, 2, 2), (1, 1, 1))


def test_a_recomputation_is_drawn_and_the_plan_beside_it_has_its_time():
    schedule = generate("zb-h1", 3, 4, recompute=Recompute.FULL)
    planned = simulate(schedule, StageCosts.uniform(3, 2, 3, 1, time_r=5))
    timeline = measured_timeline(schedule, planned.lanes, replace(PROFILED, memory_r=(3, 3, 3), time_comm=(0, 0)))
    assert timeline.costs.time_r == (5, 5, 0), "the last stage keeps its activations"
    assert timeline.makespan == simulate(schedule, timeline.costs).makespan
    assert "R recomputation" in to_svg(timeline)


def test_without_a_profile_messages_and_memory_cost_nothing():
    timeline = ran("zb-h1")
    costs = measured_timeline(timeline.schedule, timeline.lanes, None).costs
    assert costs.time_f == timeline.costs.time_f
    assert (costs.time_comm, costs.memory_f, costs.memory_w) == ((0, 0), (0, 0, 0), (0, 0, 0))


def test_idle_time_is_told_by_rank_and_cause():
    head, *rows = idle_table(ran("zb-h1")).splitlines()
    assert head.split() == ["rank", "warmup", "waiting", "for", "F", "waiting", "for", "B", "tail"]
    assert [row.split()[:2] for row in rows] == [["0", "0.00"], ["1", "2.50"], ["2", "5.00"]]


def test_the_files_show_what_ran_beside_the_plan_in_one_scale(tmp_path: Path):
    measured = ran("zb-h1")
    write_timeline(tmp_path / "new" / "folder", "step", measured, "MiB")
    folder = tmp_path / "new" / "folder"
    assert {path.name for path in folder.iterdir()} == {
        *("step.html", "step.trace.json", "step.measured.svg", "step.measured.html"),
        *("step.planned.svg", "step.planned.html"),
    }
    page = (folder / "step.html").read_text()
    widths = set()
    for kind in ("measured", "planned"):
        svg = (folder / f"step.{kind}.svg").read_text()
        assert svg in page
        assert "MiB" in svg
        # The first F takes as many pixels in both.
        widths.add(re.search(r'<rect[^>]* width="([\d.]+)"[^>]*><title>F0 on rank 0', svg)[1])
    assert len(widths) == 1
    assert idle_table(measured) in page
    events = json.loads((folder / "step.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(len(lane) for lane in measured.lanes)
    assert {op.kind for op, _, _ in measured.lanes[0]} == {OpKind.F, OpKind.B, OpKind.W}


def test_forwards_that_were_run_again_stand_where_they_ran_last(tmp_path: Path):
    """Rank 0 runs F0 and F1, learns in VALIDATE that its step was wrong, and runs both again."""
    costs = StageCosts.uniform(3, 2, 3, 1)
    schedule = with_post_validation(generate("zb-2p", 3, 4), costs)
    lanes = [list(lane) for lane in simulate(schedule, costs).lanes]
    early = [timed for timed in lanes[0] if timed.op.kind is OpKind.F][:2]
    again = [TimedOp(op, start + 100, end + 100) for op, start, end in early]
    rest = [TimedOp(op, start + 200, end + 200) for op, start, end in lanes[0] if op not in {e.op for e in early}]
    lanes[0] = [*early, *again, *rest]
    timeline = measured_timeline(schedule, lanes, PROFILED)
    assert [timed.op for timed in timeline.lanes[0]] == [timed.op for timed in lanes[0][2:]]
    write_timeline(tmp_path, "amended", timeline, "MiB")
    assert (tmp_path / "amended.html").exists()


def test_a_step_that_restores_layers_in_groups_is_planned_with_the_times_that_were_measured():
    costs = StageCosts.uniform(2, 4, 4, 4, memory_f=4, memory_b=-1, memory_w=-3, time_r=4, memory_r=3, num_blocks=4)
    schedule = replace(generate("zb-h1", 2, 4, recompute=Recompute.FULL), groups=(2, 2))
    ran = simulate(schedule, costs)
    timeline = measured_timeline(schedule, ran.lanes, costs)
    planned = simulate(timeline.schedule, timeline.costs)
    assert planned.makespan == pytest.approx(ran.makespan)
    assert planned.work == pytest.approx(ran.work)
    assert planned.peak_memory == pytest.approx(ran.peak_memory)


def test_the_optimizer_s_step_belongs_to_no_microbatch():
    schedule = with_post_validation(generate("1f1b", 2, 3), StageCosts.uniform(2))
    ran = simulate(schedule, StageCosts.uniform(2))
    longer = [
        [TimedOp(op, start, end + 9 * (op.kind is OpKind.STEP)) for op, start, end in lane[:-1]] for lane in ran.lanes
    ]
    timeline = measured_timeline(schedule, longer, None, shapes_vary=True)
    assert timeline.lengths == pytest.approx((1, 1, 1))
    assert timeline.work == pytest.approx((9, 9))
