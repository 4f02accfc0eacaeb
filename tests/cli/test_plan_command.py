"""`zero-bubble plan`: the layout of a model from a file with the costs of its units."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.plan_command import main
from megatron.zero_bubble.schedule.formats import units_from_json, units_to_json
from megatron.zero_bubble.schedule.model_costs import ModelCosts, UnitCosts

ROOT = Path(__file__).parents[2]
LAYER = UnitCosts(10, 10.5, 8, memory_f=1, memory_b=-0.5, memory_w=-0.5, time_r=9.5, memory_r=0.9, state=1)
OUTPUT = UnitCosts(30, 30, 30, memory_f=0.5, memory_b=-0.2, memory_w=-0.3, state=4)
MODEL = ModelCosts(UnitCosts(0.2, 0, 0.3, state=4), (LAYER,) * 8, OUTPUT, 0.5)
SIZE = ["--pipeline-size", "4", "--num-microbatches", "8"]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    file = tmp_path / "units.json"
    file.write_text(units_to_json(MODEL))
    return str(file)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main([*flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_file_holds_exactly_the_costs() -> None:
    assert units_from_json(units_to_json(MODEL)) == MODEL
    measured = replace(MODEL, time_exchange=0.1, time_collective=0.2, time_between=0.01, spread=0.1, fused_backward=0.9)
    assert units_from_json(units_to_json(measured)) == measured


def test_the_chosen_layout_comes_first_and_is_hardly_slower_than_any(costs, capsys):
    found = planned(capsys, "--costs", costs, *SIZE)
    chosen, *others = found["layouts"]
    assert set(chosen) == {
        *("placement", "chunks", "partition", "recompute", "vocabulary_parallel", "schedule"),
        *("is_draft", "time", "bubble", "idle", "memory"),
    }
    assert not chosen["is_draft"]
    assert sum(chosen["partition"]) == 8
    assert len(chosen["partition"]) == 4 * chosen["chunks"]
    assert len(chosen["memory"]) == 4
    assert chosen["time"] <= 1.03 * min(layout["time"] for layout in others)
    assert [split["schedule"] for split in found["megatrons_split"]] == ["auto", "1f1b"]
    assert chosen["time"] < found["megatrons_split"][1]["time"]
    assert max(chosen["memory"]) <= found["memory_limit"] * (1 + 1e-9)
    assert f"--zero-bubble-placement {chosen['placement']}" in found["flags"]


@pytest.mark.parametrize(
    ("flags", "properties"),
    [
        (
            ["--placement", "v", "--vocabulary-parallel", "on", "--recompute", "none"],
            {"placement": "v", "vocabulary_parallel": True, "recompute": "none"},
        ),
        (
            ["--num-chunks", "2", "--vocabulary-parallel", "off", "--recompute", "full"],
            {"chunks": 2, "vocabulary_parallel": False, "recompute": "full"},
        ),
        (["--num-chunks", "1"], {"placement": "linear"}),
    ],
)
def test_flags_fix_properties_of_every_layout(costs, capsys, flags, properties):
    found = planned(capsys, "--costs", costs, *SIZE, *flags)
    for name, value in properties.items():
        assert {layout[name] for layout in found["layouts"]} == {value}


def test_two_chunks_are_in_a_v_or_interleaved(costs, capsys):
    found = planned(capsys, "--costs", costs, *SIZE, "--num-chunks", "2", "--memory-limit", "2")
    assert {layout["placement"] for layout in found["layouts"]} == {"v", "interleaved"}


def test_a_limit_is_a_multiple_beside_the_states_or_bytes_or_none(costs, capsys):
    """1F1B's fullest rank has the embedding and two layers: their states, and four microbatches of two layers."""
    states, activations = 4 + 2, 4 * 2
    for multiple in (1, 1.5):
        found = planned(capsys, "--costs", costs, *SIZE, "--placement", "linear", "--memory-limit", str(multiple))
        assert found["memory_limit"] == pytest.approx(states + multiple * activations)
    assert planned(capsys, "--costs", costs, *SIZE, "--memory-limit", "20B")["memory_limit"] == 20
    assert planned(capsys, "--costs", costs, *SIZE, "--memory-limit", "auto")["memory_limit"] is None


def test_without_a_limit_a_plan_takes_more_memory_than_1f1b_if_that_is_faster(tmp_path, capsys):
    file = tmp_path / "units.json"
    file.write_text(units_to_json(replace(MODEL, output=MODEL.embedding)))
    flags = ["--costs", str(file), *SIZE, "--placement", "linear", "--vocabulary-parallel", "off"]
    flags += ["--recompute", "none"]
    limited, free = (planned(capsys, *flags, "--memory-limit", limit)["layouts"][0] for limit in ("1", "auto"))
    assert free["time"] < limited["time"]
    assert max(free["memory"]) > max(limited["memory"])


@pytest.mark.parametrize(
    ("own", "placement"),
    [
        (["--own-layers", "3,2,2,1"], "linear"),
        (["--own-layers", "2,1,1,1,1,1,1,0"], "interleaved"),
        (["--own-layers", "2,1,1,1,1,1,1,0", "--own-placement", "v"], "v"),
    ],
)
def test_the_choice_is_compared_with_the_own_layout(costs, capsys, own, placement):
    found = planned(capsys, "--costs", costs, *SIZE, *own)
    partition = [int(number) for number in own[1].split(",")]
    assert "megatrons_split" not in found
    for plan in found["your_own_layout"]:
        assert (plan["placement"], plan["partition"]) == (placement, partition)
        assert found["layouts"][0]["time"] <= plan["time"] * (1 + 1e-9)
    megatrons = {"linear": ["1f1b"], "interleaved": ["interleaved-1f1b"], "v": []}[placement]
    assert [plan["schedule"] for plan in found["your_own_layout"]] == ["auto", *megatrons]


def test_an_own_layout_as_good_as_any_stays(costs, capsys):
    chosen = planned(capsys, "--costs", costs, *SIZE, "--placement", "linear", "--vocabulary-parallel", "off")
    partition = chosen["layouts"][0]["partition"]
    own = ["--own-layers", ",".join(map(str, partition))]
    found = planned(capsys, "--costs", costs, *SIZE, "--placement", "linear", "--vocabulary-parallel", "off", *own)
    assert found["layouts"][0]["partition"] == partition


def test_the_table_ends_with_the_flags(costs, capsys):
    assert main(["--costs", costs, *SIZE, "--placement", "linear", "--vocabulary-parallel", "off"]) == 0
    head, chosen, *_, limit, gain, flags = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "layout"
    assert chosen.startswith("chosen: linear")
    assert limit == "memory limit of a rank, states included: 14"
    assert gain.startswith("speed relative to Megatron's split: ")
    assert flags.startswith("flags: --pipeline-model-parallel-layout 'E")


def test_full_recomputation_is_among_the_flags_and_in_the_memory_of_megatrons_split(costs, capsys):
    flags = ["--costs", costs, *SIZE, "--placement", "linear", "--recompute", "full"]
    found = planned(capsys, *flags)
    assert found["flags"].endswith(" --recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert main(flags) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Megatron's split, 1f1b ")]
    assert float(row.split()[-1]) == pytest.approx(max(found["megatrons_split"][1]["memory"]), rel=1e-5)


def test_a_file_may_begin_with_a_byte_order_mark(costs, capsys):
    expected = planned(capsys, "--costs", costs, *SIZE)
    Path(costs).write_text(Path(costs).read_text(), encoding="utf-8-sig")
    assert planned(capsys, "--costs", costs, *SIZE) == expected


def test_it_says_how_far_it_is(costs, capsys, monkeypatch):
    monkeypatch.setattr("megatron.zero_bubble.session.progress_lines.SILENT_SECONDS", 0.0)
    planned_again = main(["--costs", costs, *SIZE])
    assert planned_again == 0
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("zero-bubble plan: ")
    assert re.search(r": \d+ schedules planned for \d+ layouts$", first)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": []}, "'layers' must be a list with the costs of every layer, got []"),
        ({"layers": [{"time_f": 1, "time_b": 1}]}, "the costs of the layer 0 lack 'time_w'"),
        ({"layers": [{"time_f": 1, "time_b": 1, "time_w": 0}]}, "the times of the layer 0 must be above zero"),
        (
            {"output": {"time_f": 1, "time_b": 1, "time_w": 1, "memory_f": 1, "memory_b": -1, "memory_w": -1}},
            "memory_f + memory_b + memory_w of the output must not be below zero: the operations would release 2 and "
            "allocate only 1",
        ),
        (
            {"output": {"time_f": "1", "time_b": 1, "time_w": 1}},
            'time_f of the output must be 0, or have a magnitude from 1e-20 to 1e+20, got "1"',
        ),
        ({"output": {"time_f": -1, "time_b": 1, "time_w": 1}}, "time_f of the output must not be negative, got -1"),
        ({"time_comm": True}, "time_comm must be 0, or have a magnitude from 1e-20 to 1e+20, got true"),
        (
            {"time_comm": 10**30},
            f"time_comm must be 0, or have a magnitude from 1e-20 to 1e+20, got {10**30}",
        ),
        (
            {"time_comm": 10**400},
            "costs of units must be JSON: the integer 100000000000... has 401 digits, at most 60 are allowed",
        ),
        ({"ties_output": 1}, "'ties_output' must be true or false, got 1"),
        ({"embeding": {}}, "costs of units have an unknown entry 'embeding'"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_entry(tmp_path, capsys, changed, message):
    file = tmp_path / "units.json"
    file.write_text(json.dumps({**json.loads(units_to_json(MODEL)), **changed}))
    assert main(["--costs", str(file), *SIZE]) == 2
    assert capsys.readouterr().err == f"zero-bubble plan: error: argument --costs {file}: {message}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-chunks", "3", "--placement", "v"], "argument --num-chunks 3: --placement v has 2 chunks a rank"),
        (["--num-chunks", "1000"], "argument --num-chunks: must be at most 64, got 1000"),
        (["--pipeline-size", "9"], "argument --pipeline-size 9: 8 layers are not enough for 9 stages of at least one"),
        (["--num-chunks", "12"], "arguments --pipeline-size 4 --num-chunks 12: 8 layers are not enough for 48 stages"),
        (["--own-layers", "4,4"], "argument --own-layers 4,4 has 2 stages, which 4 ranks cannot hold"),
        (["--own-layers", "4,4,4,4"], "argument --own-layers 4,4,4,4 has 16 layers, but --costs"),
        (["--own-layers", "4,x"], "argument --own-layers: must be the layers of each stage, such as 9,8,8,7, got 4,x"),
        (["--own-placement", "v"], "argument --own-placement v needs --own-layers"),
        (["--memory-limit", "much"], "'much' is not a memory limit"),
        (["--memory-limit", "1B"], "argument --memory-limit 1B: no layout fits: "),
        (["--costs", ""], "argument --costs .: cannot be read: Is a directory"),
        (["--costs", "none.json"], "argument --costs none.json: cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_flag_is_one_line(costs, capsys, flags, message):
    assert main(["--costs", costs, *SIZE, *flags]) == 2
    # A search that takes more than two seconds, as on a busy machine, also reports its progress.
    [line] = [line for line in capsys.readouterr().err.splitlines() if "schedules planned" not in line]
    assert message in line


@pytest.mark.parametrize("limit", ["0.001", "1B"])
def test_the_memory_limit_that_an_error_names_is_enough(costs, capsys, limit):
    """A number that the flag reads as a multiple is given as a multiple, and an amount of memory with its unit."""
    flags = ["--costs", costs, *SIZE, "--placement", "linear", "--recompute", "none", "--vocabulary-parallel", "off"]
    assert main([*flags, "--memory-limit", limit]) == 2
    enough = re.search(r"\(--memory-limit (\S+)\)$", capsys.readouterr().err.splitlines()[-1])
    assert enough is not None
    assert enough[1].endswith("B") == limit.endswith("B")
    assert main([*flags, "--memory-limit", enough[1]]) == 0


def test_a_multiple_is_enough_although_other_ranks_decide_at_larger_multiples(tmp_path, capsys):
    """The embedding's states fill the first rank, and the last layers have all activations."""
    heavy = replace(LAYER, memory_f=60, memory_b=-30, memory_w=-30, state=0)
    light = replace(LAYER, state=0)
    model = replace(MODEL, embedding=replace(MODEL.embedding, state=900), layers=(light,) * 6 + (heavy,) * 2)
    file = tmp_path / "units.json"
    file.write_text(units_to_json(model))
    flags = ["--costs", str(file), *SIZE, "--placement", "v", "--recompute", "none", "--vocabulary-parallel", "off"]
    assert main([*flags, "--memory-limit", "0.001"]) == 2
    enough = re.search(r"\(--memory-limit (\S+)\)$", capsys.readouterr().err.splitlines()[-1])
    assert enough is not None
    assert main([*flags, "--memory-limit", enough[1]]) == 0


def test_torch_is_not_needed(costs):
    program = (
        f"import sys; from {main.__module__} import main; main({['--costs', costs, *SIZE]!r}); "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.splitlines()[-1] == "False"
