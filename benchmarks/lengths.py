"""Measure the time saved by the planned order of microbatches of different lengths, with emulated compute.

    python -m benchmarks.lengths --pipeline-size 4 --num-microbatches 8 --lengths lognormal --steps 20

The lengths are drawn at random for each step. The distribution is `lognormal` with a sigma of 0.8, or `bimodal`, in
which each microbatch is ten times as long with a probability of one in eight. The times of F, B and W of a microbatch
are proportional to its length. Every step runs three times: under 1F1B in data order, under a schedule that is planned
for the mean length, in data order, and under the same schedule in the planned order of microbatches. The last lines
have the mean ratios of the three times over all steps, and the largest difference between measured and simulated times.
Run this benchmark while nothing else uses the machine.

A mistake in the flags ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from statistics import fmean, median

from benchmarks.emulation.ranks import run_job
from benchmarks.emulation.worker import EmulatedJob
from megatron.zero_bubble.cli.invocation import at_least, command, one_number
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.microbatch_order import order_microbatches
from megatron.zero_bubble.schedule import Schedule, StageCosts, lower
from megatron.zero_bubble.session.flag_parser import flag

_SIGMA = 0.8
_LONG, _ONE_IN = 10.0, 8
_ONE_F_ONE_B, _MEAN, _PLANNED = "1f1b, order of the data", "planned for the mean", "planned order"


@dataclass(frozen=True)
class LengthsFlags:
    """lengths"""

    pipeline_size: int = flag("pipeline ranks", 4, parse=at_least(1))
    num_microbatches: int = flag("microbatches of a step", 8, parse=at_least(1))
    lengths: str = flag("how lengths are distributed", "lognormal", choices=("lognormal", "bimodal"))
    schedule: str = flag("schedule that is planned for the mean length", "auto")
    steps: int = flag("steps, each with lengths of its own", 20, parse=at_least(1))
    rounds: int = flag("how often each step runs; the median counts", 3, parse=at_least(1))
    time: float = flag(
        "milliseconds of F, of B and of W of a microbatch of mean length", 6.0, parse=one_number(above=0)
    )
    time_comm: float = flag("milliseconds of a message", 0.3, parse=one_number(above=0))
    seed: int = flag("of the lengths", 1)


def lengths_of(flags: LengthsFlags, step: int) -> list[float]:
    """Draw the lengths of a step's microbatches, divided by their mean."""
    generator = Random(f"{flags.seed} {step}")
    if flags.lengths == "lognormal":
        drawn = [generator.lognormvariate(0.0, _SIGMA) for _ in range(flags.num_microbatches)]
    else:
        drawn = [_LONG if generator.random() < 1 / _ONE_IN else 1.0 for _ in range(flags.num_microbatches)]
    return [length / fmean(drawn) for length in drawn]


@dataclass(frozen=True)
class OrderedRun:
    """A schedule, and the costs of each microbatch in the order in which the schedule runs them."""

    name: str
    step: int
    schedule: Schedule
    costs: tuple[StageCosts, ...]
    simulated: float


def contestants(flags: LengthsFlags) -> Iterator[OrderedRun]:
    """Yield three runs of every step: 1F1B, and the planned schedule in data order and in planned order."""
    p, m = flags.pipeline_size, flags.num_microbatches
    usual = costs_of(flags, 1.0)
    baseline, planned = (generate(name, p, m, costs=usual) for name in ("1f1b", flags.schedule))
    for step in range(flags.steps):
        costs = [costs_of(flags, length) for length in lengths_of(flags, step)]
        order = order_microbatches(planned, costs)
        in_order = tuple(costs[number] for number in order.places)
        alone = order_microbatches(baseline, costs, num_tried=1).time
        yield OrderedRun(_ONE_F_ONE_B, step, baseline, tuple(costs), alone)
        yield OrderedRun(_MEAN, step, planned, tuple(costs), order.time_in_data_order)
        yield OrderedRun(_PLANNED, step, planned, in_order, order.time)


def costs_of(flags: LengthsFlags, length: float) -> StageCosts:
    """The costs of a microbatch of the given length, in milliseconds and M_B."""
    time = flags.time * length
    kept = {"memory_f": length, "memory_b": -length / 2, "memory_w": -length / 2}
    return StageCosts.uniform(flags.pipeline_size, time, time, time, flags.time_comm, **kept)


@command("benchmarks.lengths", LengthsFlags, __doc__)
def main(flags: LengthsFlags) -> None:
    runs = list(contestants(flags))
    named = [replace(run.schedule, name=f"{run.name} {run.step}") for run in runs]
    seconds = (1 + flags.rounds) * sum(run.simulated for run in runs) / 1e3
    print(f"{len(runs)} runs of {flags.rounds} rounds: about {seconds:.0f} s", file=sys.stderr)
    job = EmulatedJob(
        flags.pipeline_size,
        tuple((lower(schedule, costs=run.costs[0]), run.costs) for schedule, run in zip(named, runs, strict=True)),
        steps=flags.rounds,
        activation_bytes=1 << 16,
        timeout=timedelta(seconds=60 + 10 * seconds),
    )
    records = run_job(job)
    measured = {
        (run.name, run.step): median(1e3 * (max(rank.returned for rank in ranks) - ranks[0].start) for ranks in steps)
        for run in runs
        for steps in (records.steps[f"{run.name} {run.step}"],)
    }
    simulated = {(run.name, run.step): run.simulated for run in runs}
    steps = range(flags.steps)
    heads = ("step", *(f"{name} (ms)" for name in (_ONE_F_ONE_B, _MEAN, _PLANNED)))
    rows = [(str(step), *(f"{measured[name, step]:.1f}" for name in (_ONE_F_ONE_B, _MEAN, _PLANNED))) for step in steps]
    print(table(heads, rows))
    for name in (_ONE_F_ONE_B, _MEAN):
        print(
            f"{_PLANNED} beside {name}: {_ratios(measured, name, steps)} (simulated {_ratios(simulated, name, steps)})"
        )
    error = max((abs(measured[key] / simulated[key] - 1) for key in measured), default=0.0)
    mean_error = fmean(abs(measured[key] / simulated[key] - 1) for key in measured)
    print(f"measured beside simulated: {mean_error:.1%} in the mean, {error:.1%} at most")


def _ratios(times: dict[tuple[str, int], float], name: str, steps: Sequence[int]) -> str:
    """Speed of the planned order relative to the run `name`, as text: the mean over the steps, and the least."""
    each = [times[name, step] / times[_PLANNED, step] for step in steps]
    return f"{fmean(each):.3f} times, at least {min(each):.3f}"


if __name__ == "__main__":
    sys.exit(main())
