"""What the benchmarks of vocabulary shards compare, and the memory that is counted in a training."""

from __future__ import annotations

import re

import pytest

from benchmarks.emulation.emulated_results import Result
from benchmarks.emulation.worker import StepRecord
from benchmarks.layout_gains import LayoutFlags, layouts_table, plans_of
from megatron.zero_bubble.planner import Plan
from tests.launch import TINY_GPT, run

SIZE = {"pipeline_size": 2, "num_microbatches": 4, "num_layers": 4}


def measured(name: str, plan: Plan, slowdown: float) -> Result:
    """A result whose only step took `slowdown` times as long as planned."""
    seconds = slowdown * float(plan.timeline.makespan) / 1e3
    return Result(name, plan.timeline, [[StepRecord(name, 0.0, 0.0, seconds, seconds, 0.0, 0.0)]])


def test_layouts_of_one_placement_are_compared_with_the_best_linear_split() -> None:
    plans = list(plans_of(LayoutFlags(**SIZE, placement="v", output_layers=[2.0]), 2.0))
    kinds = [plan.layout.placement.kind for _, plan in plans]
    assert kinds[:3] == ["linear"] * 3
    assert set(kinds[3:]) == {"v"}
    assert [plan.layout.vocabulary_parallel for _, plan in plans] == [False] * (len(plans) - 1) + [True]
    table = layouts_table([[measured(f"2: {name}", plan, 1.0) for name, plan in plans]])
    *_, to_linear, _, _, _ = table.splitlines()[-1].split()
    assert float(to_linear) == pytest.approx(plans[2][1].time / plans[-1][1].time, abs=1e-3)


def test_efficiency_is_the_ideal_time_over_the_measured_one() -> None:
    flags = LayoutFlags(**SIZE, placement="linear", output_layers=[1.0, 4.0])
    results = [
        [measured(f"{size:g}: {name}", plan, slowdown) for name, plan in plans_of(flags, size)]
        for size, slowdown in zip(flags.output_layers, (1.25, 2.0), strict=True)
    ]
    lines = [line.split() for line in layouts_table(results).splitlines()]
    for own, slowdown, size in zip(results, (1.25, 2.0), "14", strict=True):
        efficiencies = [float(line[-1]) for line in lines if line and line[0] == size]
        expected = [sum(result.timeline.work) / 2 / result.timeline.makespan / slowdown for result in own]
        assert efficiencies == pytest.approx(expected, abs=1e-3)
    spread = [float(line[-1]) for line in lines if "vocabulary" in line]
    assert float(lines[-1][-1]) == pytest.approx(max(spread) / min(spread), abs=2e-3)


@pytest.mark.exhaustive  # it starts trainings; test_forward_backward_memory.py counts what stages keep
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_the_peaks_of_all_ranks_are_alike_with_shards(schedule: str) -> None:
    """In a V the ranks also hold as many activations; docs/vocabulary.md shows figures of such runs."""
    flags = [*TINY_GPT, "--num-layers", "8", "--vocab-size", "2000", "--pipeline-model-parallel-size", "4"]
    flags += ["--global-batch-size", "8", "--train-iters", "2", "--position-embedding-type", "rope"]
    flags += ["--zero-bubble-schedule", schedule, "--zero-bubble-vocabulary-parallel"]
    result = run(4, "-m", "benchmarks.pretrain_gpt_counted", *flags)
    assert result.returncode == 0, result.stderr
    ratios = dict(re.findall(r"^largest to smallest, ([a-z ]+): ([\d.]+)$", result.stdout, flags=re.MULTILINE))
    assert float(ratios["states"]) < 1.01
    assert float(ratios["in all"]) < 1.1
    if schedule == "zb-v":
        assert float(ratios["activations"]) < 1.1
