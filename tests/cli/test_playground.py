"""The playground's answers, which the browser asks for, are those of the command line."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.zero_bubble.cli import playground_command, schedule_command
from megatron.zero_bubble.cli.playground.pictures import facts
from megatron.zero_bubble.cli.playground.site_files import PYODIDE, RUNTIME, START, write_site
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import HardwareQueues, StageCosts, lower, simulate
from megatron.zero_bubble.schedule.analysis import BUBBLE_WORDS
from megatron.zero_bubble.schedule.formats import Profile, costs_to_json, profile_to_json, schedule_to_json
from megatron.zero_bubble.schedule.ir import Placement
from tests.cli.playground_answers import ask
from tests.mistakes import one_line_mistake

SIZE = ["--pipeline-size=4", "--num-microbatches=8"]
TIMES = ["--time-f=10,10,12,10", "--time-b=9", "--time-w=7", "--time-comm=0.3"]


def printed(capsys, *words):
    assert schedule_command.main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "flags",
    [
        ["--schedule=1f1b"],
        ["--schedule=auto", "--memory-limit=5", "--recompute=planned"],
        ["--schedule=zb-v", "--no-overlap-communication"],
        ["--schedule=interleaved-zb", "--vocabulary-parallel=8"],
        ["--schedule=zb-2p", "--post-validation", "--steps=3"],
        ["--schedule=zb-h1", "--hardware-queues=1"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_the_page_has_the_figures_of_the_command_line(capsys, flags):
    words = [*flags, *SIZE, *TIMES]
    expected = printed(capsys, "simulate", "--json", *words)
    picture = ask("picture", words=words)
    found = picture["figures"]
    for figures in (expected, found):
        del figures["generation_seconds"]
    assert {name: found[name] for name in expected} == expected
    for word, field in (("warmup", "warmup"), ("waiting for B", "waiting_for_backward"), ("tail", "tail")):
        assert picture["causes"][word] == [bubble[field] for bubble in expected["bubble"]]


def test_every_cause_of_idle_time_has_a_colour():
    assert list(facts()["causes"]) == [word for _, word in BUBBLE_WORDS]


@pytest.mark.parametrize("name", [name for name in ENTRIES if not ENTRIES[name].is_slow])
def test_a_picture_has_all_that_is_drawn(name):
    words = [f"--schedule={name}", *SIZE, *TIMES]
    picture = ask("picture", words=words)
    lanes = picture["lanes"]
    assert max(op["end"] for lane in lanes for op in lane) == picture["figures"]["makespan"]
    for lane in lanes:
        for before, op in zip([None, *lane], lane, strict=False):
            times = [time for _, _, time in op["inputs"]] + ([before["end"]] if before else [0])
            assert op["start"] == pytest.approx(max(times)), "an operation starts when what it waits for is there"
            for rank, position, time in op["inputs"]:
                assert time >= lanes[rank][position]["end"]
            assert len(picture["kinds"][op["kind"]]["fills"]) > op["chunk"]
    path = [lanes[rank][position] for rank, position in picture["path"]]
    assert path[-1]["end"] == max(op["end"] for lane in lanes for op in lane)
    peaks = [max(value for _, value in steps) for steps in picture["memory"]]
    assert peaks == pytest.approx(picture["figures"]["peak_memory"])
    assert lanes[0][0]["name"] == "F0"


def test_the_speed_is_that_over_1f1b():
    costs = StageCosts.uniform(4, 10, 9, 7, 0.3)
    one, other = (simulate(generate(name, 4, 8), costs).cost for name in ("1f1b", "zb-h1"))
    flags = ["--time-f=10", "--time-b=9", "--time-w=7", "--time-comm=0.3"]
    assert ask("picture", words=["--schedule=zb-h1", *SIZE, *flags])["figures"]["speed_up"] == one / other


def test_the_speed_counts_the_time_of_one_iteration_in_the_same_conditions():
    words = [*SIZE, "--time-f=10", "--time-b=9", "--time-w=7", "--time-comm=0.3"]
    costs = StageCosts.uniform(4, 10, 9, 7, 0.3)
    figures = ask("picture", words=["--schedule=zb-2p", *words, "--post-validation", "--steps=3"])["figures"]
    assert figures["speed_up"] == simulate(generate("1f1b", 4, 8), costs).makespan / figures["iteration_time"]
    assert figures["speed_up"] > 1.2
    for flags, options in (
        (["--no-overlap-communication"], {"overlap_communication": False}),
        (["--hardware-queues=1"], {"hardware_queues": HardwareQueues.ONE}),
    ):
        figures = ask("picture", words=["--schedule=zb-h1", *words, *flags])["figures"]
        one = generate("1f1b", 4, 8)
        baseline = simulate(lower(one) if "hardware_queues" in options else one, costs, **options)
        assert figures["speed_up"] == baseline.makespan / figures["iteration_time"]


def test_a_point_of_the_plot_is_that_of_memory_curve(capsys):
    words = ["--schedule=auto", *SIZE, "--num-microbatches=6", *TIMES]
    expected = printed(capsys, "memory-curve", "--json", "--from=0.125", "--to=1", "--step=0.875", *words)
    found = [ask("point", words=words, limit=limit) for limit in (0.5, 4.0)]
    assert found[0]["smallest"] > 0.5
    assert expected[0]["lost"] is None
    assert all(found[1][name] == expected[1][name] for name in ("lost", "bubble_rate"))
    assert found[1]["time"] == expected[1]["iteration_time"]
    tight = {"schedule": "auto", "memory_limit": 2, "way": "both"}
    dial = printed(capsys, "memory-curve", "--dial", "--json", "--from=0.5", "--to=0.5", "--time-d=5", *words)
    both = ask("point", words=[*words, "--time-d=5", "--recompute=planned", "--offload=auto"], limit=2, of_dial=True)
    [time] = [one["iteration_time"] for one in dial if one.items() >= tight.items()]
    assert both["time"] == time


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    """The page keeps one process, in which an opened file takes the place of a file of the same name."""
    file, times = tmp_path / "costs.json", []
    for time_f in (10, 30):
        file.write_text(costs_to_json(StageCosts.uniform(4, time_f, 9, 7, 0.3)), encoding="utf-8-sig")
        assert ask("opened", file=str(file)) == {"costs": str(file), "pipeline-size": 4}
        times.append(ask("picture", words=["--schedule=zb-h1", *SIZE, f"--costs={file}"])["figures"]["makespan"])
    assert times == [simulate(generate("zb-h1", 4, 8), StageCosts.uniform(4, f, 9, 7, 0.3)).makespan for f in (10, 30)]


@pytest.mark.parametrize(
    ("words", "flag", "message"),
    [
        (["--schedule=zb-v", *SIZE, "--time-f=ten"], "time-f", "expected a number, got 'ten'"),
        (["--schedule=zb-v", *SIZE, "--time-b=1,2"], "time-b", "expected 1 number or 4, got 2"),
        (["--schedule=zb-v", "--num-microbatches=8"], "pipeline-size", "is required with --schedule"),
        (["--schedule=zb-v", *SIZE, "--num-chunks=3"], "num-chunks", "schedule zb-v has 2 chunks a rank in a V, got 3"),
        (["--schedule=auto", *SIZE, "--memory-limit=0.5"], "memory-limit", "is enough for every rank"),
        (["--schedule=auto", *SIZE, "--memory-limit=1,2"], "memory-limit", "memory_limit has 2 entries"),
        (["--schedule=best", *SIZE], "schedule", "schedule 'best' is unknown: choose one of gpipe"),
        (
            ["--schedule=interleaved-1f1b", "--pipeline-size=4", "--num-microbatches=2"],
            "num-microbatches",
            "at least 4",
        ),
    ],
)
def test_a_mistake_names_the_field_that_it_is_about(words, flag, message):
    found = ask("picture", words=words)
    assert found["flag"] == flag
    assert message in found["error"]


def test_saved_files_are_those_of_the_command_line(capsys, tmp_path):
    words = ["--schedule=zb-h1", *SIZE]
    for kind, name, flags in (
        ("json", "zb-h1.json", ["generate", "--format=json"]),
        ("csv", "zb-h1.csv", ["generate", "--format=pytorch"]),
        ("svg", "zb-h1.svg", ["draw", f"--output={tmp_path / 'x.svg'}"]),
        ("trace", "zb-h1.trace.json", ["draw", f"--output={tmp_path / 'x.json'}"]),
    ):
        assert schedule_command.main([*flags, *words]) == 0
        out = capsys.readouterr().out
        saved = ask("save", words=words, kind=kind)
        assert saved == {"name": name, "text": out or (tmp_path / f"x{Path(name).suffix}").read_text()}
    [refused] = [ask("save", words=[*words, "--vocabulary-parallel=4"], kind="csv")]
    assert "PyTorch's CSV has no word" in refused["error"]


def test_opened_files_become_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schedule, costs = generate("zb-v", 2, 4), StageCosts.uniform(4, 10, 9, 7)
    profile = Profile(schedule.placement, costs, 0.01, {"hidden_size": 64})
    Path("run.json").write_text(profile_to_json(profile))
    Path("linear.json").write_text(profile_to_json(Profile(Placement("linear", 4), costs, 0.01, {})))
    Path("costs.json").write_text(costs_to_json(costs))
    Path("zb-v.json").write_text(schedule_to_json(schedule))
    assert ask("opened", file="run.json") == {
        "costs": "run.json",
        "pipeline-size": 2,
        "num-chunks": 2,
        "placement": "v",
    }
    assert ask("opened", file="linear.json")["placement"] is None
    assert ask("opened", file="costs.json") == {"costs": "costs.json", "pipeline-size": 4}
    assert ask("opened", file="zb-v.json") == {"input": "zb-v.json", "pipeline-size": 2, "num-microbatches": 4}
    words = ["--schedule=auto", "--pipeline-size=2", "--num-microbatches=4", "--num-chunks=2", "--placement=v"]
    assert ask("picture", words=[*words, "--costs=run.json"])["figures"]["cost"] >= 4 * 2 * 26
    Path("notes.txt").write_text("hello")
    assert "'hello' is not an action" in ask("opened", file="notes.txt")["error"]


def test_help_among_the_words_is_a_mistake():
    assert ask("picture", words=["--schedule=zb-h1", *SIZE, "-h"])["error"] == "unrecognized arguments: -h"


def test_a_draft_is_a_plan_too_and_not_better_than_the_whole():
    words = [
        "--schedule=auto",
        "--pipeline-size=8",
        "--num-microbatches=32",
        "--memory-limit=6",
        "--time-f=10",
        *TIMES[1:],
    ]
    costs = [ask("picture", words=words, is_draft=is_draft)["figures"]["cost"] for is_draft in (True, False)]
    assert costs[0] > costs[1]


def test_the_page_comes_with_its_first_pictures(tmp_path, capsys):
    pyodide = tmp_path / "pyodide"
    pyodide.mkdir()
    for name in RUNTIME:
        (pyodide / name).write_text(name)
    write_site(tmp_path / "site", pyodide)
    # These are no Python that node could start; tests/browser loads a page that has a snapshot.
    assert (tmp_path / "site" / "python.snapshot").read_bytes() == b""
    assert capsys.readouterr().err.startswith("the page will take seconds longer to load: ")
    start = json.loads((tmp_path / "site" / "start.json").read_text())
    assert start["state"] == START
    assert [picture["name"] for picture in start["pictures"]] == [pane["schedule"] for pane in START["panes"]]
    assert (
        [one["name"] for one in start["facts"]["schedules"]]
        == list(ENTRIES)
        == [one["name"] for one in facts()["schedules"]]
    )


def test_the_browser_needs_nothing_but_the_packed_modules(tmp_path):
    for name in RUNTIME:
        (tmp_path / name).write_text(name)
    write_site(tmp_path / "site", tmp_path)
    shutil.unpack_archive(tmp_path / "site" / "package.zip", tmp_path / "package")
    question = json.dumps({"what": "picture", "words": ["--schedule=auto", *SIZE, *TIMES], "is_draft": False})
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from megatron.zero_bubble.cli.playground.answers import answer\n"
        "print(answer(sys.argv[2]))"
    )
    # Isolated and without site-packages: whatever is not packed, and not of Python itself, cannot be imported.
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path / "package"), question]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(result.stdout or "{}").get("name") == "auto", result.stderr


def test_a_client_that_resets_the_connection_costs_no_line(tmp_path, capsys):
    with playground_command.PlaygroundServer(str(tmp_path), 0) as server:
        with socket.create_connection(server.server_address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it is a reset
            client.sendall(b"GET / HTTP/1.1")
        before = set(threading.enumerate())
        server.handle_request()
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("flags", [["--port", "5"], ["--port", "0"], ["--no-browser"]])
def test_flags_of_the_server_are_refused_with_output(flags, tmp_path, capsys):
    line = one_line_mistake(playground_command.main, ["--output", str(tmp_path), *flags], capsys)
    assert f"argument {flags[0]}: not allowed with --output" in line


def test_a_port_in_use_is_one_line(tmp_path):
    with playground_command.PlaygroundServer(str(tmp_path), 0) as server:
        port = server.server_address[1]
        with pytest.raises(ValueError, match=f"argument --port {port}: Address already in use: --port 0 takes"):
            playground_command.PlaygroundServer(str(tmp_path), port)


def test_without_python_for_the_browser_one_line_says_how_to_get_it(tmp_path, capsys):
    assert playground_command.main(["--pyodide", str(tmp_path / "none"), "--output", str(tmp_path / "site")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "run `make playground` in a clone, or `npm install --prefix DIR pyodide@" in line
    assert not (tmp_path / "site").exists()
    assert PYODIDE.parts[-2:] == ("node_modules", "pyodide")
