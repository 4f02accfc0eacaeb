from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import PlanRequest, generate, names, placement_for
from megatron.zero_bubble.planner.registry import ENTRIES, entry_of
from megatron.zero_bubble.planner.run_schedules import RunSchedules
from megatron.zero_bubble.schedule import (
    Infeasible,
    ScheduleError,
    StageCosts,
    UnknownSchedule,
    lower,
    simulate,
    validate,
)
from megatron.zero_bubble.schedule.default_costs import default_costs
from megatron.zero_bubble.schedule.ir import Placement

GOLDEN = {
    "gpipe": ["F0 F1 F2 F3 BW0 BW1 BW2 BW3"] * 3,
    "1f1b": [
        "F0 F1 F2 BW0 F3 BW1 BW2 BW3",
        "F0 F1 BW0 F2 BW1 F3 BW2 BW3",
        "F0 BW0 F1 BW1 F2 BW2 F3 BW3",
    ],
    "zb-h1": [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ],
    "zb-h2": [
        "F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3",
        "F0 F1 F2 B0 F3 B1 B2 W0 B3 W1 W2 W3",
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3",
    ],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_three_ranks_and_four_microbatches(name):
    ops = generate(name, 3, 4).ops
    assert [" ".join(map(str, rank_ops)) for rank_ops in ops] == GOLDEN[name]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(GOLDEN)), st.integers(1, 6), st.integers(1, 12))
def test_every_size_is_valid(name, p, m):
    schedule = generate(name, p, m)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == (name, p, m)
    validate(schedule)
    validate(lower(schedule))


def test_the_registry_is_consistent_and_cannot_be_changed():
    assert set(GOLDEN) <= set(names())
    for name, entry in ENTRIES.items():
        assert entry.name == name
        assert "\n" not in entry.summary
        assert entry.uses_costs or not (entry.takes_limit or entry.takes_placement)
    with pytest.raises(TypeError):
        ENTRIES["mine"] = entry_of("1f1b")


def test_an_unknown_name_lists_all_names():
    with pytest.raises(UnknownSchedule) as error:
        generate("zb-h3", 4, 8)
    assert str(error.value) == f"schedule 'zb-h3' is unknown: choose one of {', '.join(names())}"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 4), {}, "at least one rank and one microbatch, got 0 and 4"),
        ((4, 0), {}, "at least one rank and one microbatch, got 4 and 0"),
        ((4, 4), {"num_chunks": 2}, "schedule 1f1b has 1 chunks a rank, got 2"),
        ((4, 4), {"group_size": 4}, "schedule 1f1b has no microbatch groups, got a group size of 4"),
        ((4, 4), {"costs": StageCosts.uniform(3)}, "4 stages, but the costs are for 3"),
        ((4, 4), {"memory_limit": [1, 2]}, "memory_limit has 2 entries, but there are 4 ranks"),
        ((4, 4), {"memory_limit": 0}, "memory_limit must be above zero, got 0"),
        ((4, 4), {"memory_limit": float("nan")}, "memory_limit must be above zero, got nan"),
        ((4, 4), {"host_rate": 0}, "host_rate must be above zero, got 0"),
        ((4, 4), {"placement_kind": "w"}, "the kind of a placement is one of linear, v, interleaved, got w"),
        (
            (4, 4),
            {"costs": StageCosts.uniform(4), "vocabulary_parallel": True},
            "vocabulary_parallel needs costs with the times of vocabulary shards, such as time_s",
        ),
    ],
)
def test_bad_requests_get_one_line(arguments, options, message):
    with pytest.raises(ScheduleError, match=message):
        generate("1f1b", *arguments, **options)


def test_a_request_has_a_placement():
    with pytest.raises(ScheduleError, match="placements is empty: give at least one placement"):
        PlanRequest("auto", 4, ())


def test_the_placement_is_known_before_the_schedule():
    assert placement_for("zb-h1", 4) == Placement("linear", 4)
    assert placement_for("interleaved-1f1b", 4, 3) == Placement("interleaved", 4, 3)
    for name in names():
        assert generate(name, 4, 8).placement == placement_for(name, 4)
    with pytest.raises(ScheduleError, match="schedule zb-h1 has 1 chunks a rank, got 2"):
        placement_for("zb-h1", 4, 2)


@pytest.mark.parametrize(
    ("chunks", "kind", "placement"),
    [
        (None, None, ("linear", 4, 1)),
        (1, None, ("linear", 4, 1)),
        (3, None, ("interleaved", 4, 3)),
        (None, "interleaved", ("interleaved", 4, 2)),
        (None, "v", ("v", 4, 2)),
        (2, "v", ("v", 4, 2)),
    ],
)
def test_auto_plans_for_any_placement(chunks, kind, placement):
    schedule = generate("auto", 4, 8, num_chunks=chunks, placement_kind=kind)
    assert schedule.placement == placement_for("auto", 4, chunks, kind) == Placement(*placement)
    assert (schedule.name, RunSchedules.named("auto", 4, chunks, kind).placement) == ("auto", schedule.placement)
    validate(lower(schedule))


@pytest.mark.parametrize(
    ("name", "chunks", "kind", "message"),
    [
        ("auto", 2, "linear", "a linear placement has one chunk a rank, got 2"),
        ("auto", 1, "interleaved", "schedule auto needs at least 2 chunks a rank to interleave them, got 1"),
        ("auto", 3, "v", "schedule auto has 2 chunks a rank in a V, got 3"),
        ("zb-v", None, "interleaved", "schedule zb-v has the placement v, not interleaved"),
    ],
)
def test_a_placement_that_no_schedule_has_gets_one_line(name, chunks, kind, message):
    with pytest.raises(ScheduleError, match=message):
        generate(name, 4, 8, num_chunks=chunks, placement_kind=kind)


def test_a_memory_limit_binds_schedules_that_cannot_adapt():
    assert generate("1f1b", 4, 8, memory_limit=4) == generate("1f1b", 4, 8)
    assert generate("1f1b", 4, 8, memory_limit=[4, 3, 2, 1]) == generate("1f1b", 4, 8)
    with pytest.raises(Infeasible, match=r"needs 4 .* limit of 3.9") as error:
        generate("1f1b", 4, 8, memory_limit=3.9)
    assert error.value.smallest_limit == 4
    with pytest.raises(Infeasible, match=r"on rank 2 schedule 1f1b needs 2 "):
        generate("1f1b", 4, 8, memory_limit=[4, 3, 1.5, 1])
    in_bytes = StageCosts.uniform(4, memory_f=1000, memory_b=-500, memory_w=-500)
    assert generate("1f1b", 4, 8, costs=in_bytes, memory_limit=4000) == generate("1f1b", 4, 8)
    with pytest.raises(Infeasible):
        generate("1f1b", 4, 8, costs=in_bytes, memory_limit=3999)


def test_default_costs_measure_memory_in_whole_ranks():
    costs = default_costs(Placement("v", 4, 2))
    assert costs.memory_f == (0.5,) * 8
    peaks = simulate(generate("1f1b", 4, 8), default_costs(Placement("linear", 4))).peak_memory
    assert peaks == (4, 3, 2, 1)
