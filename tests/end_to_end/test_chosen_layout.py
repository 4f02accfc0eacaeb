"""Trainings whose layout is chosen: what they print, and that they compute what megatron-core does on that layout."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.zero_bubble.cli.benchmark.training_turn import read_log
from tests.launch import TINY_GPT
from tests.trainings import run_trainings

FLAGS = [
    *TINY_GPT,
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--train-iters", "8"),
    *("--vocab-size", "4000", "--num-layers", "5"),
]
"""An output as long as several layers, and a number of layers that two stages do not divide."""


WHOLE = ("--zero-bubble-vocabulary-parallel", "off")


@dataclass(frozen=True)
class Runs:
    folder: Path
    printed: dict[str, str]

    def numerics(self, name: str) -> bytes:
        return (self.folder / f"{name}.jsonl").read_bytes()

    def layout(self, name: str) -> list[str]:
        """The flags that the job prints to repeat its layout."""
        [line] = re.findall(r"^     the same layout in another run: (.*)$", self.printed[name], re.MULTILINE)
        return shlex.split(line)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("chosen")
    chosen = {
        "any": [*FLAGS, "--zero-bubble", "--save", str(folder / "checkpoints"), "--save-interval", "4"],
        "linear": [*FLAGS, "--zero-bubble", "--zero-bubble-placement", "linear", *WHOLE],
    }
    return Runs(folder, run_trainings(2, chosen, folder))


def test_a_table_shows_the_choice_and_megatrons_split_and_the_first_steps_run_the_plan(runs: Runs) -> None:
    printed = runs.printed["any"]
    assert re.search(r"^ > layout chosen for 2 ranks and 8 microbatches$", printed, re.M)
    assert re.search(r"^     chosen: ", printed, re.M)
    assert len(re.findall(r"^     Megatron's split, (auto|1f1b) ", printed, re.M)) == 2
    assert re.search(r"^     speed relative to Megatron's split: [\d.]+ under auto, [\d.]+ under 1f1b$", printed, re.M)
    # On a busy machine no other layout may be predicted 2% faster.
    gain = re.search(r"^     predicted: idle .* ms, [\d.]+ times as fast as (1F1B.*)$", printed, re.M)
    assert gain
    last = rf"^ > iterations \d+ to 8: .*; {re.escape(gain[1])} is predicted to take [\d.]+ ms, [\d.]+ times"
    assert re.search(last, printed, re.M)
    assert printed.index("layout chosen") < printed.index(" iteration ")
    assert " > zero-bubble plan; times measured up to step 6" in printed


def test_the_benchmark_reads_the_choice_and_its_figures_from_the_log(runs: Runs) -> None:
    turn = read_log(runs.printed["linear"], warmup=7, resident_bytes=1.0)
    assert turn.layout is not None
    assert re.fullmatch(r"linear(, R where needed)?( \dx?\d?){1,2}", turn.layout)
    assert turn.idle
    assert turn.predicted_bubble_rate is not None
    assert turn.predicted_ms is not None


def test_a_job_that_goes_on_keeps_its_layout_and_its_numbers(runs: Runs) -> None:
    (runs.folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    load = {"resumed": [*FLAGS, "--zero-bubble", "--load", str(runs.folder / "checkpoints")]}
    again = Runs(runs.folder, run_trainings(2, load, runs.folder))
    assert f" > layout: that of the checkpoint in --load {runs.folder / 'checkpoints'}" in again.printed["resumed"]
    assert again.numerics("resumed").splitlines() == runs.numerics("any").splitlines()[4:]


def test_a_placement_that_is_asked_for_is_chosen(runs: Runs) -> None:
    """Whether it recomputes depends on the measured times."""
    layout = runs.layout("linear")
    assert layout[0] == "--pipeline-model-parallel-layout"
    placement = layout.index("--zero-bubble-placement")
    assert layout[placement : placement + 2] == ["--zero-bubble-placement", "linear"]
    assert "--zero-bubble-seed-by-layer" in layout
    vocabulary = layout.index(WHOLE[0])
    assert tuple(layout[vocabulary : vocabulary + 2]) == WHOLE


def test_the_printed_flags_give_the_numbers_of_megatron_cores_schedule(runs: Runs) -> None:
    layout = runs.layout("linear")
    same = {
        "ours": [*FLAGS, *layout, "--zero-bubble"],
        "megatron": [*FLAGS, *layout[:2], "--zero-bubble-seed-by-layer"],
    }
    again = Runs(runs.folder, run_trainings(2, same, runs.folder))
    assert "layout chosen" not in again.printed["ours"]
    assert again.numerics("ours") == again.numerics("megatron") == runs.numerics("linear")
