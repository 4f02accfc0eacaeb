"""What the benchmark of microbatches of different lengths runs and prints."""

from __future__ import annotations

import re

import pytest

from benchmarks import lengths
from benchmarks.lengths import LengthsFlags, contestants, lengths_of, main


@pytest.mark.parametrize("distribution", ["lognormal", "bimodal"])
def test_steps_have_lengths_of_their_own_with_the_same_mean(distribution: str):
    flags = LengthsFlags(num_microbatches=16, lengths=distribution)
    first, second = lengths_of(flags, 0), lengths_of(flags, 1)
    assert first != second
    assert first == lengths_of(flags, 0)
    assert sum(first) == pytest.approx(16) == sum(second)
    assert max(first) > 2 * min(first)


def test_every_step_runs_the_same_microbatches_three_times():
    one_f_one_b, mean, planned = contestants(LengthsFlags(num_microbatches=6, steps=1, pipeline_size=3))
    assert one_f_one_b.costs == mean.costs
    assert sorted(planned.costs, key=repr) == sorted(mean.costs, key=repr)
    assert mean.schedule == planned.schedule
    assert planned.simulated <= mean.simulated < one_f_one_b.simulated


def test_ratios_are_printed_with_the_simulated_ones(capsys: pytest.CaptureFixture[str]):
    assert (
        main(["--pipeline-size", "2", "--num-microbatches", "3", "--steps", "2", "--rounds", "1", "--time", "2"]) == 0
    )
    output = capsys.readouterr().out
    number = r"\d+\.\d{3} times, at least \d+\.\d{3}"
    for name in (lengths._ONE_F_ONE_B, lengths._MEAN):
        assert re.search(rf"planned order beside {name}: {number} \(simulated {number}\)\n", output)
    assert re.search(r"measured beside simulated: \d+\.\d% in the mean, \d+\.\d% at most\n", output)
