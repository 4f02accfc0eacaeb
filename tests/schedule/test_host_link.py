"""Copies to the host and back: when they pass, what they release, and which schedules with them are valid."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from megatron.zero_bubble.schedule import (
    HardwareQueues,
    InvalidSchedule,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    StageCosts,
    bubbles,
    lower,
    simulate,
    validate,
)
from megatron.zero_bubble.schedule.analysis import causes
from megatron.zero_bubble.schedule.block_groups import in_groups, with_memory_of_all_groups
from megatron.zero_bubble.schedule.draw import to_chrome_trace, to_svg
from megatron.zero_bubble.schedule.formats import (
    costs_from_json,
    costs_to_json,
    schedule_from_csv,
    schedule_from_json,
    schedule_to_csv,
    schedule_to_json,
    schedule_to_pytorch_csv,
)
from megatron.zero_bubble.schedule.generators.zb_h1 import zb_h1
from megatron.zero_bubble.schedule.host_link import (
    host_memory,
    num_offloaded,
    with_copies_everywhere,
    without_copies,
)
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.recomputation import with_recomputation

FIRST = "F0 F1 D0 D1 H0 B0 H1 W0 B1 W1"
SECOND = "F0 B0 W0 F1 B1 W1"


def schedule(first: str = FIRST, second: str = SECOND, groups: tuple[int, ...] = ()) -> Schedule:
    ops = tuple(tuple(map(Op.parse, words.split())) for words in (first, second))
    return Schedule("copies", Placement("linear", 2), 2, ops, groups)


def costs(time_d: float = 1, time_h: float = 2) -> StageCosts:
    uniform = StageCosts.uniform(2, memory_b=-0.25, memory_w=-0.75)
    return replace(uniform, time_d=(time_d,) * 2, time_h=(time_h,) * 2, memory_d=(0.75,) * 2)


def times(timeline, rank: int = 0) -> dict[str, tuple[float, float]]:
    return {str(op): (start, end) for op, start, end in timeline.lanes[rank]}


def test_copies_pass_on_the_link_one_after_the_other_while_the_rank_computes():
    timeline = simulate(schedule(), costs())
    assert [(str(op), start, end) for op, start, end in timeline.copies[0]] == [
        *(("D0", 1, 2), ("D1", 2, 3), ("H0", 3, 5), ("H1", 6, 8)),
    ]
    assert timeline.copies[1] == ()
    at = times(timeline)
    assert at["D1"] == (3, 3)  # the rank waits for the copy
    assert at["H0"] == (3, 3)  # and does not wait here
    assert at["B0"] == (5, 6)  # but here
    assert at["W0"] == (6, 7)  # the second copy back passes meanwhile
    assert at["B1"] == (8, 9)
    assert timeline.work == (6, 6)


@pytest.mark.parametrize("queues", HardwareQueues)
def test_on_streams_copies_take_as_long(queues):
    on_streams = simulate(lower(schedule()), costs(), hardware_queues=queues)
    assert on_streams.copies == simulate(schedule(), costs()).copies


def test_waiting_for_copies_is_a_cause_of_its_own():
    timeline = simulate(schedule(), costs())
    assert bubbles(timeline)[0].waiting_for_copy == 4
    assert bubbles(timeline)[0].total == timeline.makespan - 6
    assert causes(timeline)["waiting for copies"] == (4, 0)
    assert "waiting for copies" not in causes(simulate(without_copies(schedule()), costs()))


def test_memory_leaves_at_d_and_is_back_at_h():
    assert simulate(schedule(), costs()).peak_memory == (2, 1)
    assert simulate(schedule("F0 D0 F1 D1 H0 B0 W0 H1 B1 W1"), costs()).peak_memory == (1.25, 1)
    assert host_memory(schedule(), costs()) == (1.5, 0)
    assert num_offloaded(schedule()) == 2


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ("F0 F1 D0 B0 W0 B1 W1", "rank 0 lacks H0 for D0"),
        ("F0 F1 H0 B0 W0 B1 W1", "rank 0 lacks D0 for H0"),
        ("F0 F1 D0 B0 H0 W0 B1 W1", "rank 0 runs B0 before H0, which it needs"),
        ("D0 F0 F1 H0 B0 W0 B1 W1", "rank 0 runs D0 before F0, which it needs"),
        ("F0 F1 H0 D0 B0 W0 B1 W1", "rank 0 runs H0 before D0, which it needs"),
        ("F0 F1 D0 R0 H0 B0 W0 B1 W1", "rank 0 runs D0 and also R0: recomputed activations cannot be offloaded"),
        ("F0 D0 H0 F1 &B0 W0 B1 W1", "rank 0 runs D0 and also &B0: activations of a pair cannot be offloaded"),
    ],
)
def test_what_is_released_comes_back_in_no_other_way(first, problem):
    validate(schedule())
    with pytest.raises(InvalidSchedule, match=problem):
        validate(schedule(first))


def test_a_stage_that_restores_in_groups_copies_only_what_its_f_keeps():
    restored = replace(costs(), time_r=(1, 1), memory_r=(0.5, 0.5), num_blocks=(2, 2))
    restoring = schedule(groups=(2, 1))
    validate(restoring)
    timeline = simulate(restoring, restored)
    assert [op.end - op.start for op in timeline.copies[0]] == pytest.approx([2 / 3, 2 / 3, 4 / 3, 4 / 3])
    assert timeline.peak_memory == (1.5, 1)
    assert host_memory(restoring, restored) == (1, 0)
    of_groups = in_groups(restored, (2, 1))
    again = with_memory_of_all_groups(of_groups, (2, 1))
    assert (again.memory_d, again.time_d, again.time_h) == (restored.memory_d, restored.time_d, restored.time_h)


def test_every_stage_is_measured_and_nothing_is_left_when_copies_are_removed():
    plain = zb_h1(3, 4)
    measuring = with_copies_everywhere(with_recomputation(plain))
    validate(lower(measuring))
    assert num_offloaded(measuring) == 3
    assert without_copies(with_copies_everywhere(plain)) == plain
    assert with_copies_everywhere(plain.forward_only()) == plain.forward_only()
    assert measuring.forward_only().kinds == {OpKind.F}


def test_files_keep_copies_and_groups():
    lowered = lower(schedule())
    assert schedule_from_json(schedule_to_json(lowered)) == lowered
    for one in (schedule(), replace(zb_h1(2, 4), groups=(2, 1)), zb_h1(2, 4)):
        assert schedule_from_csv(schedule_to_csv(one)) == one
    assert costs_from_json(costs_to_json(costs())) == costs()
    with pytest.raises(ScheduleError, match="has D and H, for which PyTorch's CSV has no word"):
        schedule_to_pytorch_csv(schedule())
    with pytest.raises(ScheduleError, match="groups of layers, for which PyTorch's CSV has no word"):
        schedule_to_pytorch_csv(replace(zb_h1(2, 4), groups=(2, 1)))
    with pytest.raises(ScheduleError, match="groups must be whole numbers"):
        schedule_from_csv(schedule_to_csv(replace(zb_h1(2, 4), groups=(2, 1))).replace("2 1", "2 x"))


def test_pictures_show_every_copy():
    svg = to_svg(simulate(schedule(), costs()))
    ElementTree.fromstring(svg)
    for words in ("D0 on the host link of rank 0: 1 to 2 ms", "H1 on the host link of rank 0: 6 to 8 ms"):
        assert words in svg
    assert "D copy to the host" in svg
    events = json.loads(to_chrome_trace(simulate(schedule(), costs())))["traceEvents"]
    [link] = [event["tid"] for event in events if event.get("args", {}).get("name") == "host link of rank 0"]
    on_link = [event["name"] for event in events if event.get("tid") == link and event["ph"] == "X"]
    assert on_link == ["D0", "D1", "H0", "H1"]
