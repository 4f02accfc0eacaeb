from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import (
    Placement,
    Schedule,
    ScheduleError,
    StageCosts,
    lower,
    repeat,
    validate,
    with_post_validation,
)
from megatron.zero_bubble.schedule.formats import (
    costs_from_json,
    costs_to_json,
    schedule_from_csv,
    schedule_from_json,
    schedule_from_pytorch_csv,
    schedule_from_text,
    schedule_to_csv,
    schedule_to_grid,
    schedule_to_json,
    schedule_to_pytorch_csv,
)
from tests.schedule.made_once import made_once
from tests.schedule.random_schedules import schedules
from tests.schedule.test_lower import made_of


@settings(max_examples=60, deadline=None)
@given(schedules(), st.booleans(), st.text(max_size=5))
def test_json_round_trips_exactly(schedule, lowered, name):
    if lowered:
        schedule = lower(schedule)
    schedule = Schedule(name, schedule.placement, schedule.num_microbatches, schedule.ops)
    assert schedule_from_json(schedule_to_json(schedule)) == schedule


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_csv_round_trips(schedule):
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule
    assert schedule_from_csv(schedule_to_csv(lower(schedule))) == schedule


def test_a_spreadsheet_may_fill_rows_quote_cells_and_separate_them_otherwise():
    schedule = generate("zb-h1", 2, 4)
    rows = [line.split(",") for line in schedule_to_csv(schedule).splitlines()]
    width = max(map(len, rows))
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    for separator in ",;\t":
        assert schedule_from_text("".join(f"{separator.join(row)}\n" for row in rows) + "\n", "name") == schedule
        quoted = "".join(separator.join(f'"{cell}"' for cell in row) + "\n" for row in rows)
        assert schedule_from_text(quoted, "name") == schedule


@settings(max_examples=60, deadline=None)
@given(schedules(), st.booleans())
def test_pytorchs_dialect_round_trips(schedule, lowered):
    read = schedule_from_pytorch_csv(schedule_to_pytorch_csv(lower(schedule) if lowered else schedule), "random")
    assert read.ops == schedule.ops
    assert read.num_microbatches == schedule.num_microbatches
    if schedule.num_ranks > 1 and schedule.num_chunks > 1:
        assert read.placement == schedule.placement


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-2p", "zb-v", "interleaved-zb"])
def test_post_validation_round_trips_in_our_own_formats(name, steps):
    schedule = made_once(name, 4, 8)
    schedule = repeat(with_post_validation(schedule, StageCosts.uniform(schedule.num_stages)), steps)
    assert schedule_from_json(schedule_to_json(schedule)) == schedule
    assert schedule_from_json(schedule_to_json(lower(schedule))) == lower(schedule)
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule


def test_the_grid_has_columns_for_what_takes_no_time():
    ops = ("F0 VALIDATE0 F1 BW0 BW1 STEP0", "VALIDATE0 F0 BW0 F1 BW1 STEP0")
    assert schedule_to_grid(made_of("linear", 2, 1, 2, *ops)) == (
        "rank 0 |           F0  VALIDATE0 F1          BW0 ---           BW1 --- STEP0\n"
        "rank 1 | VALIDATE0               F0  BW0 --- F1  BW1 --- STEP0\n"
    )


def test_pytorchs_dialect_has_no_word_for_post_validation():
    schedule = with_post_validation(generate("zb-h1", 2, 2), StageCosts.uniform(2))
    with pytest.raises(ScheduleError, match=r"zb-h1 has STEP and VALIDATE, .* write JSON or CSV"):
        schedule_to_pytorch_csv(schedule)


def test_vocabulary_shards_round_trip_in_our_own_formats_alone():
    schedule = generate("v-half", 2, 3, vocabulary_parallel=True)
    for each in (schedule, lower(schedule)):
        assert schedule_from_json(schedule_to_json(each)) == each
        with pytest.raises(ScheduleError) as error:
            schedule_to_pytorch_csv(each)
        assert str(error.value) == (
            "schedule v-half has E, EW, S, L and T, for which PyTorch's CSV has no word: write JSON or CSV"
        )
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule
    costs = StageCosts.uniform(4).with_shards(schedule.placement, {"time_s": 0.5, "time_t": 0.25, "memory_s": 0.1})
    assert costs_from_json(costs_to_json(costs)) == costs


def test_json_is_readable():
    assert json.loads(schedule_to_json(generate("zb-h1", 2, 2))) == {
        "format": "megatron-zero-bubble schedule",
        "version": 1,
        "name": "zb-h1",
        "placement": {"kind": "linear", "num_ranks": 2, "num_chunks": 1},
        "num_microbatches": 2,
        "ops": ["F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1"],
    }


def test_the_grid_shows_who_waits():
    assert schedule_to_grid(generate("1f1b", 2, 3)) == (
        "rank 0 | F0  F1          BW0 --- F2  BW1 ---     BW2 ---\nrank 1 |     F0  BW0 --- F1  BW1 --- F2  BW2 ---\n"
    )


def test_csv_is_the_grid():
    assert schedule_to_csv(generate("zb-h1", 2, 2)).splitlines() == [
        "schedule,placement,ranks,chunks,microbatches",
        "zb-h1,linear,2,1,2",
        "F0,F1,,B0,W0,B1,W1",
        ",F0,B0,F1,B1,W0,W1",
    ]


def test_pytorchs_csv_has_its_letters_and_stages():
    mixed = made_of("v", 2, 2, 1, "F0 F0.1 B0.1 W0.1 B0 W0", "F0 F0.1 BW0.1 BW0")
    assert schedule_to_pytorch_csv(mixed).split() == ["0F0,3F0,3I0,3W0,0I0,0W0", "1F0,2F0,2B0,1B0"]
    assert schedule_to_pytorch_csv(lower(mixed, 0)).split()[1] == "1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0"


@pytest.mark.parametrize(
    ("name", "chunks", "kind"),
    [
        ("Interleaved1F1B", 2, "interleaved"),
        ("LoopedBFS", 2, "interleaved"),
        ("InterleavedZeroBubble", 2, "interleaved"),
        ("InterleavedZeroBubble", 3, "interleaved"),
        ("ZBVZeroBubble", 2, "v"),
        ("DualPipeV", 2, "v"),
    ],
)
@pytest.mark.parametrize("with_communication", [False, True])
def test_pytorchs_own_schedules(name, chunks, kind, with_communication):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    actions = visualizer.get_schedule_ops(name, 4, 8, chunks, with_comms=with_communication)
    text = "\n".join(",".join("" if action is None else str(action) for action in row) for row in actions)
    schedule = schedule_from_pytorch_csv(text, name)
    assert schedule.placement == Placement(kind, 4, chunks)
    assert schedule.num_microbatches == 8
    if name != "LoopedBFS":  # its backwards of a chunk go from the last microbatch to the first
        validate(schedule)
        validate(lower(schedule))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zb"])
def test_pytorch_reads_ours(name):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = made_once(name, 4, 8)
    rows = schedule_to_pytorch_csv(schedule).split()
    actions = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)
    }
    assert torch_schedules._validate_schedule(actions, 4, schedule.num_stages, 8) == {
        stage: schedule.placement.rank_of(stage) for stage in range(schedule.num_stages)
    }


def test_waits_of_torch_2_15_are_left_out():
    text = "0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n"
    text += "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\n"
    assert [str(op) for ops in schedule_from_pytorch_csv(text).ops for op in ops] == ["F0", "BW0"] * 2


def test_an_overlapped_pair_is_two_ops():
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD,,0B2\n"
    assert [str(op) for op in schedule_from_pytorch_csv(text).ops[0]] == ["F0", "F1", "F2", "&BW0", "BW1", "BW2"]


def test_costs_round_trip_exactly():
    costs = StageCosts((0.1, 3), (1 / 3, 2), (5, 6), (1e-30,), (1, 2), (-0.5, -1), (-0.5, -1))
    assert costs_from_json(costs_to_json(costs)) == costs
    assert costs_from_json(costs_to_json(StageCosts.uniform(1, Fraction(1, 4)))).time_f == (0.25,)


GOOD = json.loads(schedule_to_json(generate("1f1b", 2, 2)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", 'expected a JSON object with "format"'),
        ({"format": "something else"}, 'expected a JSON object with "format"'),
        ({**GOOD, "version": 2}, "version 2 of the format is unknown: this release reads versions 1 to 1"),
        ({**GOOD, "version": "1"}, "version '1'"),
        ({**GOOD, "colour": "blue"}, "unknown key colour"),
        ({key: value for key, value in GOOD.items() if key != "ops"}, "lacks ops"),
        ({**GOOD, "placement": "linear"}, "placement needs the keys"),
        ({**GOOD, "placement": {"kind": "ring", "num_ranks": 2, "num_chunks": 1}}, "'ring' is unknown"),
        ({**GOOD, "placement": {"kind": [], "num_ranks": 2, "num_chunks": 1}}, "is unknown"),
        ({**GOOD, "placement": {"kind": "linear", "num_ranks": 2.0, "num_chunks": 1}}, "num_ranks must be a whole"),
        ({**GOOD, "num_microbatches": True}, "num_microbatches must be a whole number, got True"),
        ({**GOOD, "num_microbatches": 10**400}, "the integer 100000000000... has 401 digits"),
        ({**GOOD, "name": 3}, "name must be a string"),
        ({**GOOD, "ops": "F0"}, "one string a rank"),
        ({**GOOD, "ops": ["F0"]}, "operations for 1 ranks"),
        ({**GOOD, "ops": ["F0 G1", ""]}, "'G1' is not an operation"),
        ({**GOOD, "ops": ["F0 F" + "9" * 5000, ""]}, "is not an operation"),
    ],
)
def test_malformed_json_is_refused_in_one_line(text, message):
    with pytest.raises(ScheduleError, match=message) as error:
        schedule_from_json(text if isinstance(text, str) else json.dumps(text))
    assert "\n" not in str(error.value)


COSTS = json.loads(costs_to_json(StageCosts.uniform(2)))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**COSTS, "version": 9}, "version 9"),
        ({**COSTS, "time_f": 1}, "time_f must be a list of numbers, one a stage, got 1"),
        ({**COSTS, "time_f": [1, "2"]}, "time_f must be a list of numbers"),
        ({**COSTS, "time_f": [1, True]}, "time_f must be a list of numbers"),
        ({**COSTS, "time_w": [1, float("nan")]}, "time_w must be finite"),
        ({**COSTS, "time_comm": [1, 1]}, "time_comm has 2 entries"),
        (GOOD, "costs"),
    ],
)
def test_malformed_costs_are_refused(document, message):
    with pytest.raises(ScheduleError, match=message):
        costs_from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a first line"),
        ("schedule,placement,ranks,chunks,microbatches\nx,linear,two,1,1\n", "must be whole numbers, got two"),
        ("schedule,placement,ranks,chunks,microbatches\nx,ring,2,1,1\n", "'ring' is unknown"),
        ("schedule,placement,ranks,chunks,microbatches\nx,linear,2,1,1\nF0\n", "operations for 1 ranks"),
        ("schedule,placement,ranks,chunks,microbatches\nx,linear,1,1,1\nF\n", "'F' is not an operation"),
        ('"', "not CSV"),
    ],
)
def test_malformed_csv_is_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        schedule_from_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "no actions"),
        ("0F0,0G0", "'0G0' is not an action"),
        ("F0", "'F0' is not an action"),
        ("0F", "'0F' is not an action"),
        ("0F0,0B0\n0F0,0B0", "expected a linear"),
        ("1F0\n0F0", "expected a linear"),
        ("0F0,1F0\n2F0,3F0", "expected a linear"),
        ("0F0\n\n1F0", "expected a linear"),
    ],
)
def test_malformed_pytorch_csv(text, message):
    with pytest.raises(ScheduleError, match=message):
        schedule_from_pytorch_csv(text)


def test_a_w_that_release_0_1_marked_as_one_of_the_tail_is_read_as_w():
    schedule = generate("zb-h1", 2, 2)
    marked = schedule_to_json(schedule).replace(" W", " WT")
    assert "WT1" in marked
    assert schedule_from_json(marked) == schedule
    assert schedule_from_csv(schedule_to_csv(schedule).replace(",W", ",WT")) == schedule
