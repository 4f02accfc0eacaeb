"""Runs driven by measured times: what they compute, print and write."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.zero_bubble.runtime.replanner import CHECK_AFTER
from megatron.zero_bubble.schedule.formats import costs_from_text, profile_from_json
from tests.changes import BothOrdersTried
from tests.launch import TINY_GPT
from tests.trainings import run_trainings

PIPELINE = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--clip-grad", "0.5"]
PLANNED = ("--zero-bubble", "--zero-bubble-keep-layout")
WINDOW_END, LOOK = 4, 20
"""Iterations: the last profiled one, the one after which drift is looked for."""
TRIED = WINDOW_END + 3 * CHECK_AFTER
"""The iteration at which a trial of both orders ends."""
LAST = TRIED + 1
DRAWN = (6, 7)
PERCENT = r"\d+\.\d\d%"
RAMP = ("--global-batch-size", "6", "--rampup-batch-size", "2", "2", "12")
UNEVEN = {
    "first": ("--decoder-first-pipeline-num-layers", "1"),
    "last": ("--decoder-last-pipeline-num-layers", "1"),
    "layout": ("--pipeline-model-parallel-layout", "Ett|ttL", "--untie-embeddings-and-output-weights"),
    "layout-of-chunks": ("--pipeline-model-parallel-layout", "E|tt|t|tL"),
}


@dataclass(frozen=True)
class Runs:
    """Trainings on two ranks; those whose name begins with `base` use megatron-core's own schedule."""

    folder: Path
    printed: dict[str, str]

    def numerics(self, name: str) -> bytes:
        return (self.folder / f"{name}.jsonl").read_bytes()

    def log_lines(self, name: str) -> dict[int, str]:
        """The log lines of a training, by iteration."""
        found = re.finditer(r"^ \[.*?\] iteration +(\d+)/.*$", self.printed[name], re.MULTILINE)
        return {int(match[1]): match[0] for match in found}

    def plans(self, name: str) -> list[str]:
        """The blocks that a training prints, one for each plan that it makes."""
        return re.findall(r"^ > zero-bubble plan; .*\n(?:     .*\n)+", self.printed[name], re.MULTILINE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("planned")
    long = [*PIPELINE, "--global-batch-size", "4", "--train-iters", str(LAST)]
    profile = str(folder / "profile.json")
    trainings = {
        "base": long,
        "planned": [
            *(*long, "--zero-bubble-schedule", "auto", "--zero-bubble-profile-iters", "2", str(WINDOW_END)),
            *("--zero-bubble-profile-output", profile, "--zero-bubble-replan-threshold", "1e-9"),
            *("--zero-bubble-timeline", str(folder / "timeline"), "--zero-bubble-timeline-iters", *map(str, DRAWN)),
        ],
        "from-profile": [
            *(*long, *PLANNED, "--zero-bubble-profile-input", profile, "--zero-bubble-memory-limit", "1.5"),
        ],
        "tried": [*long, *PLANNED, "--zero-bubble-profile-iters", "2", str(WINDOW_END), BothOrdersTried()],
        "base-ramp": [*PIPELINE, *RAMP],
        "ramp": [*PIPELINE, *RAMP, *PLANNED, "--zero-bubble-profile-iters", "1", "2"],
    }
    return Runs(folder, run_trainings(2, trainings, folder))


@pytest.mark.parametrize("name", ["planned", "from-profile", "tried"])
def test_profiling_planning_and_planning_again_change_no_number(runs: Runs, name: str) -> None:
    assert runs.numerics(name) == runs.numerics("base")


def test_both_orders_are_measured(runs: Runs) -> None:
    *_, block = runs.plans("tried")
    assert block.startswith(f" > zero-bubble plan; times measured up to step {TRIED}, ")
    measured = r"1f1b [\d.]+ ms, the planned order [\d.]+ ms: continuing with (the planned order|1f1b)"
    outcome = re.search(rf"\n     measured in both orders: {measured}\n", block)
    assert outcome is not None
    kept = {"the planned order": "auto (planned)", "1f1b": "1f1b (kept)"}[outcome[1]]
    assert f"\n     schedule {kept} for 4 microbatches" in block


def test_a_batch_that_grows_changes_no_number(runs: Runs) -> None:
    assert runs.numerics("ramp") == runs.numerics("base-ramp")


@pytest.mark.exhaustive  # tests/session/test_layers.py trains with uneven stages, and the tests above plan
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_stages_compute_what_megatron_cores_do(tmp_path: Path, name: str) -> None:
    uneven = [*PIPELINE, "--global-batch-size", "4", "--train-iters", "8", *UNEVEN[name]]
    runs = Runs(tmp_path, run_trainings(2, {"base": uneven, "planned": [*uneven, *PLANNED]}, tmp_path))
    assert runs.numerics("planned") == runs.numerics("base")
    assert runs.plans("planned")


def test_the_block_says_times_schedule_and_prediction(runs: Runs) -> None:
    """A block is printed after the profiled iterations, and when the times have drifted.

    Between the two there is one if the iterations that followed the plan took other times than planned.
    """
    number = r"+(-?[\d.]+)"
    first, *checked, again = runs.plans("planned")
    for block in checked:
        assert re.match(rf" > zero-bubble plan; times measured up to step {WINDOW_END + CHECK_AFTER}, ", block)
        assert re.search(r"\n     compared with the plan before: .* ms, [\d.]+ were planned\n", block)
    assert len(checked) <= 1
    assert re.match(rf" > zero-bubble plan; times measured up to step {WINDOW_END}, spread [\d.]+%\n", first)
    assert re.match(rf" > zero-bubble plan; times measured up to step {LOOK}, spread [\d.]+%\n", again)
    for block in (first, again):
        stages = re.findall(rf"^ {number} {number} {number} {number} {number} .*", block, re.MULTILINE)
        assert [(stage, rank) for stage, rank, *_ in stages] == [("0", "0"), ("1", "1")]
        assert all(float(time) > 0 for _, _, *times in stages for time in times)
        assert re.search(r"schedule auto \(planned\) for 4 microbatches, memory limit [\d.]+ MiB\n", block)
        idle = rf"idle {PERCENT} \(imbalance {PERCENT}, bubble rate {PERCENT}\)"
        assert re.search(rf"predicted: {idle}, [\d.]+ ms, [\d.]+ times as fast as 1F1B\n", block)
        assert re.search(r"peak activations of each rank \(MiB\): [\d.]+, [\d.]+\n", block)


def test_the_log_line_ends_with_the_measured_and_the_predicted_bubble(runs: Runs) -> None:
    """Log lines have a prediction from the end of the profile on."""
    measured = r"\| number of nan iterations: +0 \|"
    measured += f" idle: {PERCENT} \\| imbalance: {PERCENT} \\| bubble rate: {PERCENT} \\|"
    lines = runs.log_lines("planned")
    assert sorted(lines) == list(range(1, LAST + 1))
    for iteration, line in lines.items():
        predicted = f" predicted: {PERCENT} \\|" if iteration >= WINDOW_END else ""
        assert re.search(f"{measured}{predicted}$", line), line
    assert all("bubble" not in line for line in runs.log_lines("base").values())


def test_a_profile_saves_the_profiling(runs: Runs) -> None:
    """The plan is there before the first iteration, and made from the very same costs."""
    text = (runs.folder / "profile.json").read_text()
    profile = profile_from_json(text)
    assert costs_from_text(text) == profile.costs
    assert profile.costs.num_stages == 2
    assert min(profile.costs.memory_f) > 0
    [block] = runs.plans("from-profile")
    assert block.startswith(" > zero-bubble plan; times from a profile\n")
    assert all(" predicted: " in line for line in runs.log_lines("from-profile").values())
    start = runs.printed["from-profile"].index
    assert start(block) < start(" iteration ")


def test_each_number_of_microbatches_has_a_plan(runs: Runs) -> None:
    """Only the first number is measured; the others are planned from its costs, before their first step."""
    printed = runs.printed["ramp"]
    planned = re.findall(r"schedule auto \(planned\) for (\d) microbatches", printed)
    assert planned == ["2", "4", "6"]
    sizes = [int(size) for size in re.findall(r"global batch size: +(\d+) ", printed)]
    assert sizes == [2, 2, 2, 4, 4, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("iteration", DRAWN)
def test_a_timeline_shows_what_every_rank_did_beside_the_plan(runs: Runs, iteration: int) -> None:
    stem = str(runs.folder / "timeline" / f"iteration_{iteration:07d}")
    events = json.loads(Path(f"{stem}.trace.json").read_text())["traceEvents"]
    for rank in range(2):
        names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == rank]
        operations = [f"{kind}{name[-1]}" for name in names for kind in ("F", "B", "W") if kind in name]
        assert sorted(operations) == sorted(f"{kind}{microbatch}" for kind in "FBW" for microbatch in range(4))
    for kind in ("measured", "planned"):
        svg = Path(f"{stem}.{kind}.svg").read_text()
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert svg in Path(f"{stem}.html").read_text()
        assert Path(f"{stem}.{kind}.html").exists()
    assert "waiting for B" in Path(f"{stem}.html").read_text()


def test_no_other_iteration_is_drawn(runs: Runs) -> None:
    files = {path.name.split(".")[0] for path in (runs.folder / "timeline").iterdir()}
    assert files == {f"iteration_{iteration:07d}" for iteration in DRAWN}
