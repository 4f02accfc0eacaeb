"""The costs of stages that restore activations in groups of layers: less memory at a time, and more work in B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.zero_bubble.schedule import Op, Placement, Schedule, ScheduleError, StageCosts, simulate
from megatron.zero_bubble.schedule.block_groups import in_groups, with_memory_of_all_groups
from megatron.zero_bubble.schedule.formats import schedule_from_json, schedule_to_json
from megatron.zero_bubble.schedule.formats.json_format import costs_from_json, costs_to_json
from megatron.zero_bubble.schedule.memory import peak_memory
from megatron.zero_bubble.schedule.recomputation import with_recomputation_everywhere, without_recomputation

STAGE = StageCosts(
    *((10,), (12,), (8,), ()),
    *((100,), (-40,), (-60,)),
    time_r=(8,),
    memory_r=(80,),
    num_blocks=(4,),
    memory_outside=(4,),
)
"""One stage of four blocks, whose other layers hold 4 of the 60 that wait for W."""


def test_r_and_w_have_one_group_and_b_the_others():
    two = in_groups(STAGE, (2,))
    assert (two.time_f, two.time_r, two.time_b, two.time_w) == ((10,), (4,), (12 + 4 + 4,), (4,))
    assert two.memory_f == (20 + 40,)
    assert two.memory_r == (40,)
    pending = 4 + 56 / 2
    assert two.memory_b == (pending - 60,)
    assert two.memory_w == (-pending,)


def test_with_as_many_groups_as_blocks_one_block_is_there_at_a_time():
    for groups in (4, 9):
        four = in_groups(STAGE, (groups,))
        assert (four.time_r, four.time_w, four.memory_r) == ((2,), (2,), (20,))
        assert four.time_b == (12 + 6 + 6,)


def test_r_has_the_largest_group_and_w_the_smallest():
    of_seven = in_groups(replace(STAGE, num_blocks=(7,)), (3,))
    assert of_seven.time_r == (pytest.approx(8 * 3 / 7),)
    assert of_seven.time_w == (pytest.approx(8 * 2 / 7),)


@pytest.mark.parametrize("groups", [(), (1,)])
def test_one_group_changes_nothing(groups):
    assert in_groups(STAGE, groups) is STAGE


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_the_memory_of_one_group_tells_that_of_all(groups):
    measured = in_groups(STAGE, (groups,))
    whole = with_memory_of_all_groups(measured, (groups,))
    for name in ("memory_f", "memory_b", "memory_w", "memory_r"):
        assert getattr(whole, name) == pytest.approx(getattr(STAGE, name))


def test_the_memory_of_all_groups_is_not_underestimated_if_no_r_has_run():
    """Then F keeps its last group, 60 of the 100; what it keeps of the other group counts as if R restored it, too."""
    measured = replace(in_groups(STAGE, (2,)), memory_r=(0,))
    whole = with_memory_of_all_groups(measured, (2,))
    assert whole.memory_f == (4 + 2 * 56,)
    assert whole.memory_r == (2 * 56,)
    assert whole.memory_f[0] + whole.memory_b[0] + whole.memory_w[0] == 0


def test_a_schedule_in_groups_is_simulated_and_counted_in_groups():
    ops = (tuple(map(Op.parse, ["F0", "F1", "R0", "B0", "W0", "R1", "B1", "W1"])),)
    schedule = Schedule("small", Placement("linear", 1), 2, ops, (4,))
    timeline = simulate(schedule, STAGE)
    assert timeline.makespan == 2 * (10 + 8 + 12 + 8)
    assert timeline.work == (timeline.makespan,)
    assert peak_memory(schedule, STAGE) == (20 + 20 + 20,)
    assert schedule_from_json(schedule_to_json(schedule)) == schedule
    assert without_recomputation(schedule).groups == ()
    assert with_recomputation_everywhere(schedule).groups == (4,)


def test_costs_with_blocks_are_read_back():
    assert costs_from_json(costs_to_json(STAGE)) == STAGE


@pytest.mark.parametrize("groups", [(1, 2), (0,)])
def test_wrong_groups_are_refused(groups):
    with pytest.raises(ScheduleError, match="groups must be one number above zero for each of 1 stages"):
        Schedule("small", Placement("linear", 1), 1, ((),), groups)
    text = schedule_to_json(Schedule("small", Placement("linear", 1), 1, ((),), (2,))).replace("2\n ]", '"2"\n ]')
    with pytest.raises(ScheduleError, match="groups must be a list of whole numbers"):
        schedule_from_json(text)
