from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.planner import generate, names
from megatron.zero_bubble.schedule import StageCosts, lower, simulate
from megatron.zero_bubble.schedule.formats import (
    costs_to_json,
    schedule_from_json,
    schedule_from_pytorch_csv,
    schedule_to_csv,
    schedule_to_json,
    schedule_to_pytorch_csv,
)
from tests.schedule.random_schedules import posted_ahead

ROOT = Path(__file__).parent.parent.parent

SIZE = ["--pipeline-size", "4", "--num-microbatches", "8"]


def test_list_names_every_schedule_in_order(ok):
    assert [line.split()[0] for line in ok("list").splitlines()] == list(names())


def test_the_list_as_json_has_every_schedule_in_order(ok):
    rows = json.loads(ok("list", "--json"))
    assert [row["schedule"] for row in rows] == list(names())


def test_lengths_of_microbatches_are_relative(ok):
    """A step with a long first microbatch takes longer; lengths that are alike change nothing."""
    words = ("simulate", "--schedule", "1f1b", *SIZE, "--json", "--lengths")
    long, alike = (json.loads(ok(*words, lengths)) for lengths in ("8" + ",1" * 7, "3" + ",3" * 7))
    assert long["makespan"] > alike["makespan"] == pytest.approx(33)
    assert sum(alike["peak_memory"]) == pytest.approx(4 + 3 + 2 + 1)


def test_lengths_do_not_go_with_iterations_that_interlock(run):
    status, _, errors = run(
        "simulate", "--schedule", "zb-h1", *SIZE, "--lengths", "1,2,1,1,1,1,1,1", "--post-validation"
    )
    assert (status, "argument --lengths: not allowed with --post-validation" in errors) == (2, True)


def test_simulate_as_json_has_every_figure(ok):
    figures = json.loads(ok("simulate", "--schedule", "zb-h1", *SIZE, "--json"))
    seconds = figures.pop("generation_seconds")
    assert 0 <= seconds < 5
    assert figures.pop("lower_bound") <= 27
    assert figures.pop("bubble")[1] == {
        "warmup": 1,
        "waiting_for_forward": 0,
        "waiting_for_backward": 2,
        "waiting_for_validation": 0,
        "waiting_for_copy": 0,
        "communication": 0,
        "tail": 0,
        "streams": 0,
    }
    assert figures.pop("critical_path")[:3] == ["0:F0", "1:F0", "2:F0"]
    assert figures == {
        "schedule": "zb-h1",
        "pipeline_size": 4,
        "num_microbatches": 8,
        "num_chunks": 1,
        "placement": "linear",
        "cost": 27,
        "makespan": 27,
        "idle": 3 / 27,
        "imbalance": 0,
        "bubble_rate": 3 / 27,
        "recomputed": 0,
        "lost": pytest.approx(3 / 27),
        "offloaded": 0,
        "host_memory": [0, 0, 0, 0],
        "cost_in_backward": None,
        "peak_memory": [4.0, 3.5, 3.0, 2.5],
        "peak_memory_op": ["F3", "F3", "F3", "F3"],
        "span": [27, 26, 25, 24],
        "num_messages": 2 * 3 * 8,
        "overlap_communication": True,
        "hardware_queues": None,
        "post_validation": False,
        "steps": 1,
        "iteration_time": 27,
        "iteration_time_without_post_validation": 27,
    }


def test_costs_are_those_of_whole_ranks(ok):
    flags = ["--time-f", "1,2,3,4", "--time-comm", "0.1,0.2,0.3", "--memory-f", "2,4,2,2", "--memory-b", "-1,-2,-1,-1"]
    one = json.loads(ok("simulate", "--schedule", "1f1b", *SIZE, *flags, "--memory-w", "-1,-2,-1,-1", "--json"))
    costs = StageCosts(
        *[(1, 2, 3, 4), (1, 1, 1, 1), (1, 1, 1, 1), (0.1, 0.2, 0.3), (0.5, 1, 0.5, 0.5)],
        *[(-0.25, -0.5, -0.25, -0.25)] * 2,
    )
    timeline = simulate(generate("1f1b", 4, 8), costs)
    assert one["cost"] == timeline.cost
    assert one["peak_memory"] == [2, 3, 1, 0.5], "in units of the largest --memory-f"
    two = json.loads(ok("simulate", "--schedule", "interleaved-1f1b", *SIZE, *flags[:4], "--json"))
    halves = tuple(time / 2 for time in (1, 2, 3, 4, 1, 2, 3, 4))
    costs = StageCosts(
        halves, (0.5,) * 8, (0.5,) * 8, (0.1, 0.2, 0.3, 0.3, 0.1, 0.2, 0.3), (0.5,) * 8, (-0.25,) * 8, (-0.25,) * 8
    )
    assert two["cost"] == pytest.approx(simulate(generate("interleaved-1f1b", 4, 8), costs).cost)
    assert two["peak_memory"][0] == 5.5


def test_costs_from_a_file_count_as_those_of_the_flags(ok, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(costs_to_json(StageCosts.uniform(4, 3, 2, 1, 0.5, memory_f=8, memory_b=-4, memory_w=-4)))
    flags = ["--time-f", "3", "--time-b", "2", "--time-comm", "0.5"]
    for name in ("zb-h1", "interleaved-1f1b"):
        from_file, from_flags = (
            json.loads(ok("simulate", "--schedule", name, *SIZE, "--json", *costs))
            for costs in (["--costs", path], flags)
        )
        assert from_file["cost"] == from_flags["cost"]
        assert from_file["peak_memory"] == from_flags["peak_memory"]


def test_communication_that_does_not_overlap_costs_more(ok):
    overlapped, occupying = (
        json.loads(ok("simulate", "--schedule", "1f1b", *SIZE, "--time-comm", "0.5", "--json", *flag))
        for flag in ([], ["--no-overlap-communication"])
    )
    assert occupying["cost"] > overlapped["cost"]
    assert occupying["bubble"][1]["communication"] > 0


def test_plans_are_made_for_communication_that_does_not_overlap(ok):
    size = ["--pipeline-size", "8", "--num-microbatches", "32", "--no-overlap-communication"]
    times = ["--time-b", "2", "--time-w", "0.001", "--time-comm", "5"]
    names = ["--schedule", "1f1b", "--schedule", "zb-1p", "--schedule", "auto", "--schedule", "zb-2p"]
    costs = [one["cost"] for one in json.loads(ok("compare", *names, *size, *times, "--json"))]
    assert max(costs) == costs[0]


def test_post_validation_lets_iterations_interlock(ok):
    flags = ["--schedule", "zb-2p", *SIZE, "--post-validation"]
    once, twice = (json.loads(ok("simulate", *flags, "--steps", steps, "--json")) for steps in (1, 2))
    for one in (once, twice):
        assert (one["iteration_time"], one["iteration_time_without_post_validation"]) == (24, 27)
        assert one["post_validation"] is True
        assert one["num_microbatches"] == 8
    assert (once["makespan"], twice["makespan"]) == (27, 27 + 24)
    assert (once["bubble_rate"], twice["bubble_rate"]) == (0, 0)
    assert (once["lost"], twice["lost"]) == (0, 0)
    table = ok("compare", *flags, "--schedule", "1f1b").splitlines()
    assert [line.split()[-3:] for line in table] == [
        ["iteration", "without", "gain"],
        ["24", "27", "12.50%"],
        ["33", "33", "0.00%"],
    ]
    assert "waiting for validation" in ok("simulate", *flags)


def test_post_validation_in_a_file(ok, tmp_path):
    path = tmp_path / "schedule.json"
    ok("generate", "--schedule", "zb-2p", *SIZE, "--post-validation", "--lower", "--output", path)
    assert schedule_from_json(path.read_text()).has_post_validation
    assert json.loads(ok("simulate", "--input", path, "--steps", "3", "--json"))["makespan"] == 27 + 24 + 24
    drawing = tmp_path / "drawing.svg"
    ok("draw", "--input", path, "--steps", "2", "--output", drawing)
    assert ">4 ranks, 8 microbatches, 2 iterations: idle" in drawing.read_text()
    assert "VALIDATE of iteration 2 on rank 3" in drawing.read_text()
    assert "of iteration 1" in ok("simulate", "--input", path, "--steps", "3").splitlines()[-1]
    path_of_three = json.loads(ok("simulate", "--input", path, "--steps", "3", "--json"))["critical_path"]
    assert path_of_three[0] == "0:F0 of iteration 1"
    assert "3:W7 of iteration 3" in path_of_three


def test_compare_has_a_row_for_each_schedule_in_json_text_and_markdown(ok):
    found = json.loads(ok("compare", "--schedule", "1f1b", "--schedule", "zb-h1", *SIZE, "--json"))
    assert [(one["schedule"], one["cost"]) for one in found] == [("1f1b", 33), ("zb-h1", 27)]
    table = ok("compare", "--schedule", "interleaved-1f1b", "--schedule", "zb-h1", *SIZE, "--num-chunks", "4")
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [["interleaved-1f1b", "8.57%"], ["zb-h1", "11.11%"]]
    markdown = ok("compare", "--schedule", "1f1b", *SIZE, "--markdown").splitlines()
    assert markdown[2].startswith("| 1f1b     | 27.27% |")


def test_compare_of_all_leaves_out_what_cannot_be(ok):
    table = ok("compare", "--schedule", "gpipe", "--pipeline-size", "3", "--num-microbatches", "4")
    assert "gpipe" in table
    for limit, expected in ((["--memory-limit", "3"], {"1f1b", "zb-h1"}),):
        found = json.loads(ok("compare", "--pipeline-size", "3", "--num-microbatches", "4", *limit, "--json"))
        present = {one["schedule"] for one in found}
        assert expected <= present
        assert not {"gpipe", "zb-h2", "interleaved-1f1b"} & present


@pytest.mark.parametrize("lowered", [False, True])
def test_generate_writes_what_validate_and_simulate_read(ok, tmp_path, lowered):
    schedule = lower(generate("zb-h1", 4, 8)) if lowered else generate("zb-h1", 4, 8)
    path = tmp_path / "schedule.json"
    assert ok("generate", "--schedule", "zb-h1", *SIZE, "--output", path, *["--lower"] * lowered) == ""
    assert schedule_from_json(path.read_text()) == schedule
    assert ok("validate", "--input", path) == "zb-h1 is valid: 4 ranks, 8 microbatches, 96 operations, 48 messages\n"
    assert json.loads(ok("simulate", "--input", path, "--json"))["cost"] == 27
    assert [entry.name for entry in tmp_path.iterdir()] == ["schedule.json"]


def test_validate_counts_messages_and_no_collectives(ok, tmp_path):
    path = tmp_path / "shards.json"
    flags = ["--schedule", "zb-h1", *SIZE, "--vocabulary-parallel", "4"]
    ok("generate", *flags, "--lower", "--format", "json", "--output", path)
    assert ok("validate", "--input", path).endswith(" 48 messages\n")


def test_bubble_and_r_of_pairs_are_a_share_of_the_time(ok):
    """A pair takes less time than its two operations, and so does a fused backward."""
    times = ["--all-to-all-f", "0.3", "--all-to-all-b", "0.3", "--num-chunks", "2"]
    found = json.loads(ok("simulate", "--schedule", "interleaved-pairs", *SIZE, *times, "--json"))
    assert found["lost"] == pytest.approx(found["bubble_rate"])


def test_the_gain_of_r_apart_is_told_of_one_iteration(ok):
    flags = ["--schedule", "auto", *SIZE, "--recompute", "full", "--post-validation", "--json"]
    one, three = (json.loads(ok("simulate", *flags, "--steps", steps))["cost_in_backward"] for steps in ("1", "3"))
    assert one > 0
    assert three is None


def test_what_one_hardware_queue_costs(ok, tmp_path):
    """1F1B with its receives two ahead: nothing with many queues. As we lower it, nothing with one either."""
    path = tmp_path / "schedule.json"
    path.write_text(schedule_to_json(posted_ahead(lower(generate("1f1b", 4, 8)), 2)))

    def figures(*flags):
        found = json.loads(ok("simulate", *flags, "--json"))
        return found["hardware_queues"], found["makespan"], max(bubble["streams"] for bubble in found["bubble"])

    assert figures("--input", path) == (None, 33, 0)
    assert figures("--input", path, "--hardware-queues", "many") == ("many", 33, 0)
    assert figures("--input", path, "--hardware-queues", "1") == ("1", 38, 7)
    assert figures("--schedule", "1f1b", *SIZE, "--hardware-queues", "1") == ("1", 33, 0)


def test_a_schedule_that_stands_still_with_one_queue_is_refused_and_can_be_lowered_anew(run, ok, tmp_path):
    path, anew = tmp_path / "schedule.json", tmp_path / "anew.json"
    path.write_text(schedule_to_json(posted_ahead(lower(generate("gpipe", 2, 4)), 2)))
    for command in ("validate", "simulate"):
        status, output, errors = run(command, "--input", path)
        assert (status, output) == (2, "")
        assert errors == (
            f"zero-bubble schedule {command}: error: schedule gpipe deadlocks with one hardware queue "
            "(CUDA_DEVICE_MAX_CONNECTIONS=1): rank 0 at RECV_BACKWARD1 waits for SEND_BACKWARD0 of rank 1; "
            "rank 1 at F3 waits for SEND_FORWARD3 of rank 0; lower it again to remove the deadlock\n"
        )
    ok("generate", "--input", path, "--lower", "--output", anew)
    assert "is valid" in ok("validate", "--input", anew)


def test_one_queue_in_tables_and_pictures(ok, tmp_path):
    flags = ("--schedule", "zb-2p", *SIZE, "--time-comm", "0.6", "--hardware-queues", "1")
    assert "streams" in ok("simulate", *flags)
    assert "zb-2p" in ok("compare", *flags)
    ok("draw", *flags, "--output", tmp_path / "one.svg")
    assert "gain" in ok("simulate", *flags, "--post-validation", "--steps", "3")


@pytest.mark.parametrize("write", [schedule_to_csv, schedule_to_pytorch_csv, schedule_to_json])
def test_every_format_is_recognised(ok, tmp_path, write):
    path = tmp_path / "schedule"
    path.write_text(write(generate("interleaved-zb", 2, 4)))
    figures = json.loads(ok("validate", "--input", path, "--json"))
    assert figures["operations"] == 2 * 2 * 4 * 3
    assert schedule_from_pytorch_csv(ok("generate", "--input", path, "--format", "pytorch")).num_chunks == 2


def test_draw_takes_its_format_from_the_suffix_and_its_unit_from_the_times(ok, tmp_path):
    for suffix, start in ((".svg", "<svg"), (".html", "<!DOCTYPE html>"), (".json", '{"displayTimeUnit"')):
        path = tmp_path / f"picture{suffix}"
        assert ok("draw", "--schedule", "zb-h2", *SIZE, "--output", path) == ""
        assert path.read_text().startswith(start)
    assert ">time (F)</text>" in (tmp_path / "picture.svg").read_text(), "it is 1 by default"
    ok("draw", "--schedule", "zb-h2", *SIZE, "--output", tmp_path / "picture.svg", "--time-b", "2")
    assert ">time (ms)</text>" in (tmp_path / "picture.svg").read_text()


def test_compare_shows_what_r_gains_and_costs(ok):
    full = ["--recompute", "full", "--json"]
    one, same, longer, smaller = (
        json.loads(ok("compare", "--schedule", "zb-h1", *SIZE, *full, *flags))[0]
        for flags in ([], ["--time-r", "1", "--memory-r", "0.9375"], ["--time-r", "2"], ["--memory-r", "0.5"])
    )
    assert one["cost"] == same["cost"] == 8 * 4 + 2, "a bubble of (p-1)(F+B-W), but the last rank recomputes nothing"
    assert one["cost_in_backward"] == 8 * 4 + 6, "R makes the bubble (p-1)(F+R+B-W)"
    assert (one["recomputed"], one["lost"]) == (3 / 4, 1 - 24 / 34)
    assert longer["cost"] > one["cost"]
    assert smaller["peak_memory"][0] > one["peak_memory"][0]
    table = ok("compare", "--schedule", "zb-h1", *SIZE, "--recompute", "full")
    assert table.splitlines()[0].endswith("recomputed  bubble and R  cost with R in B  gain of R apart")


def test_a_file_with_recomputation_is_read_simulated_and_drawn(ok, tmp_path):
    planned = ["--schedule", "auto", *SIZE, "--recompute", "planned", "--memory-limit", "2.4"]
    path = tmp_path / "planned.json"
    ok("generate", *planned, "--output", path)
    assert schedule_from_json(path.read_text()).recomputes
    assert "is valid" in ok("validate", "--input", path)
    made, read = (json.loads(ok("simulate", *source, "--json")) for source in (planned, ["--input", path]))
    assert {**made, "generation_seconds": 0} == {**read, "generation_seconds": 0}
    ok("draw", "--input", path, "--output", tmp_path / "planned.svg")
    assert ">R recomputation<" in (tmp_path / "planned.svg").read_text()


def test_costs_of_recomputation_from_a_file(ok, tmp_path):
    path = tmp_path / "costs.json"
    costs = StageCosts.uniform(4, memory_f=8, memory_b=-4, memory_w=-4, time_r=1, memory_r=7.5)
    path.write_text(costs_to_json(costs))
    flags = ["--schedule", "zb-1p", *SIZE, "--recompute", "full", "--json"]
    from_file, from_flags = (json.loads(ok("simulate", *flags, *more)) for more in (["--costs", path], []))
    assert (from_file["cost"], from_file["peak_memory"]) == (from_flags["cost"], from_flags["peak_memory"])
