"""The benchmark of a training keeps its own number of chunks, its groups and its layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_benchmark import TINY

from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import BASELINE, gather
from megatron.zero_bubble.cli.benchmark.own_training import of_own_training
from megatron.zero_bubble.cli.invocation import read_flags

OWN = [*TINY, "--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--lr", "1e-3"]
CHUNKS, GROUP = "--num-virtual-stages-per-pipeline-rank", "--microbatch-group-size-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"
INTERLEAVED = "megatron-core interleaved, "


def words_of(*more: str) -> dict[str, list[str]]:
    """Return the flags of every schedule's training, by the name of the schedule."""
    flags, others = of_own_training(read_flags(BenchmarkFlags, ["--", *OWN, *more], "benchmark", ""), 0)
    field = gather(flags, False, others)
    assert not {CHUNKS, GROUP} & {*field.flags}
    return {one.name: [*field.flags[len(TINY) :], *one.words] for one in field.contestants}


def test_interleaved_schedules_have_the_group_size_of_the_training():
    words = words_of(CHUNKS, "2", GROUP, "4")
    assert words[f"{INTERLEAVED}2 chunks"][-4:] == [CHUNKS, "2", GROUP, "4"]
    assert GROUP not in words[BASELINE]


@pytest.mark.parametrize("flags", [(CHUNKS, "3"), ("--num-layers-per-virtual-pipeline-stage", "2")])
def test_the_number_of_chunks_of_the_training_is_compared(flags):
    assert f"{INTERLEAVED}3 chunks" in words_of("--num-layers", "12", *flags)


@pytest.mark.parametrize("layout", ["Et|t|t|tL", "Et|(t|)*2tL"])
def test_a_layout_of_several_chunks_is_not_called_1f1b(layout):
    words = words_of(LAYOUT, layout)
    assert LAYOUT not in words[BASELINE]
    assert words[f"{INTERLEAVED}your layout"][-2:] == [LAYOUT, layout]
    assert words["--zero-bubble"][-2:] == [LAYOUT, layout]
    assert words[f"{INTERLEAVED}2 chunks"][-2:] == [CHUNKS, "2"]


def test_a_layout_of_one_chunk_is_1f1bs_and_no_other_number_of_chunks_takes_it(capsys):
    words = words_of(LAYOUT, "Et|t*3L")
    assert list(words) == [BASELINE, "--zero-bubble"]
    assert all(LAYOUT in each for each in words.values())
    assert f"{INTERLEAVED}2 chunks left out: give {CHUNKS} or {LAYOUT}, not both" in capsys.readouterr().err


def test_a_schedule_that_keeps_the_layout_keeps_the_number_of_chunks():
    for flags in (["--zero-bubble-schedule", "interleaved-zb"], ["--zero-bubble", "--zero-bubble-keep-layout"]):
        words = words_of(CHUNKS, "2", *flags)
        assert words[" ".join(flags)][-2:] == [CHUNKS, "2"]


def test_a_pattern_of_several_stages_a_rank_is_refused(tmp_path: Path):
    script = tmp_path / "pretrain_hybrid.py"
    script.touch()
    given = [str(script), *OWN, "--hybrid-layer-pattern", "*|-|*|-", "--zero-bubble-cpu"]
    with pytest.raises(ValueError, match=r"^argument --hybrid-layer-pattern \*\|-\|\*\|-: .*leave out its \|$"):
        of_own_training(read_flags(BenchmarkFlags, ["--", *given], "benchmark", ""), 0)
