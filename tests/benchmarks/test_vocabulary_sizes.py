"""What the benchmarks of vocabulary shards compare, and the memory that is counted in a training."""

from __future__ import annotations

import re

import pytest

from benchmarks.emulation.emulated_results import Result
from benchmarks.emulation.worker import StepRecord
from benchmarks.layout_gains import LayoutFlags, layouts_table, plans_of
from benchmarks.vocabulary_sizes import SizesFlags, sizes_table
from benchmarks.vocabulary_sizes import plans_of as plans_of_sizes
from megatron.zero_bubble.planner import Plan
from tests.launch import TINY_GPT, run

SIZE = {"pipeline_size": 2, "num_microbatches": 4, "num_layers": 4}


def measured(name: str, plan: Plan, slowdown: float) -> Result:
    """A result whose only step took `slowdown` times as long as planned."""
    seconds = slowdown * float(plan.timeline.makespan) / 1e3
    return Result(name, plan.timeline, [[StepRecord(name, 0.0, 0.0, seconds, seconds, 0.0, 0.0)]])


def test_layouts_of_one_placement_are_compared_with_the_best_linear_split() -> None:
    plans = list(plans_of(LayoutFlags(**SIZE, placement="v", output_layers=2)))
    kinds = [plan.layout.placement.kind for _, plan in plans]
    assert kinds[:3] == ["linear"] * 3
    assert set(kinds[3:]) == {"v"}
    assert [plan.layout.vocabulary_parallel for _, plan in plans] == [False] * (len(plans) - 1) + [True]
    table = layouts_table([measured(name, plan, 1.0) for name, plan in plans])
    *_, to_linear, _, _ = table.splitlines()[-1].split()
    assert float(to_linear) == pytest.approx(plans[2][1].time / plans[-1][1].time, abs=1e-3)


def test_efficiency_is_the_ideal_time_over_the_measured_one() -> None:
    flags = SizesFlags(**SIZE, placement="linear", output_layers=[1.0, 4.0])
    plans = list(plans_of_sizes(flags))
    assert [plan.layout.vocabulary_parallel for _, plan in plans] == [True, True]
    slow, slower = (sum(plan.timeline.work) / 2 / plan.time for _, plan in plans)
    table = sizes_table([measured(*plans[0], 1.25), measured(*plans[1], 2.0)])
    efficiencies = [float(line.split()[-1]) for line in table.splitlines()[1:3]]
    assert efficiencies == pytest.approx([slow / 1.25, slower / 2.0], abs=1e-3)
    ratio = max(slow / 1.25, slower / 2.0) / min(slow / 1.25, slower / 2.0)
    assert float(table.splitlines()[-1].split()[-1]) == pytest.approx(ratio, abs=1e-3)


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
