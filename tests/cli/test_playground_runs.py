"""The playground opens the traces that `--zero-bubble-timeline` writes, and refuses others in one line."""

from __future__ import annotations

import json

import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import StageCosts, simulate
from megatron.zero_bubble.schedule.draw import to_chrome_trace
from tests.cli.playground_answers import ask


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "interleaved-zb"])
def test_a_run_s_trace_is_read_back_as_it_was(tmp_path, name):
    schedule = generate(name, 2, 4)
    timeline = simulate(schedule, StageCosts.uniform(schedule.num_stages, 1.5, 2.25, 1, 0.5))
    file = tmp_path / "iteration_0000005.trace.json"
    file.write_text(to_chrome_trace(timeline))
    assert ask("opened", file=str(file)) == {"run": str(file), "pipeline-size": 2, "num-microbatches": 4}
    found = ask("run", file=str(file), planned=False)
    assert found["name"] == schedule.name
    assert [[(op["name"], op["start"], op["end"]) for op in lane] for lane in found["lanes"]] == [
        [(str(timed.op), timed.start, timed.end) for timed in lane] for lane in timeline.lanes
    ]
    assert found["figures"]["bubble_rate"] == timeline.bubble_rate
    assert found["figures"]["peak_memory"] == list(timeline.peak_memory)
    planned = ask("run", file=str(file), planned=True)
    assert planned["figures"]["makespan"] < found["figures"]["makespan"], "messages took time, which no operation has"


def test_another_trace_is_refused_in_one_line(tmp_path):
    (tmp_path / "other.json").write_text('{"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2}]}')
    assert ask("opened", file=str(tmp_path / "other.json"))["error"].startswith(
        "not a trace that --zero-bubble-timeline wrote"
    )


ARGS = ("stage", "chunk", "microbatch")
DAMAGES = (None, "x", {}, -1, 10**18, 10**400, float("nan"), float("inf"))


@pytest.mark.parametrize("names", [("ts",), ("dur",), ("cat",), ("tid",), ("args",), *(("args", n) for n in ARGS)])
def test_a_damaged_trace_is_an_error_or_a_picture(tmp_path, names):
    trace = to_chrome_trace(simulate(generate("zb-h1", 2, 4), StageCosts.uniform(2, 1.5, 2.25, 1, 0.5)))
    file = tmp_path / "damaged.trace.json"
    for damage in DAMAGES:
        document = json.loads(trace)
        at = next(event for event in document["traceEvents"] if event["ph"] == "X")
        for name in names[:-1]:
            at = at[name]
        at[names[-1]] = damage
        file.write_text(json.dumps(document))
        for planned in (False, True):
            found = ask("run", file=str(file), planned=planned)
            assert "lanes" in found or found["error"].startswith("not a trace that --zero-bubble-timeline wrote: ")


def test_a_damaged_memory_counter_is_an_error(tmp_path):
    timeline = simulate(generate("zb-h1", 2, 4), StageCosts.uniform(2))
    document = json.loads(to_chrome_trace(timeline))
    document["traceEvents"].append({"ph": "C", "name": "memory of rank x", "ts": 1, "args": {"value": 1}})
    (tmp_path / "trace.json").write_text(json.dumps(document))
    assert "invalid literal" in ask("run", file=str(tmp_path / "trace.json"), planned=False)["error"]


def test_a_trace_without_operations_is_said_to_have_none(tmp_path):
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    assert ask("opened", file=str(tmp_path / "trace.json"))["error"].endswith(": it has no operations")
