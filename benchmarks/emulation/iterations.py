"""Runs successive iterations with and without post-validation, for `benchmarks.emulate --post-validation`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.emulation.arguments import EmulationFlags
from benchmarks.emulation.emulated_results import Result, make_job
from benchmarks.emulation.ranks import Records, run_job
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.cli.schedule.planned_figures import figures_of_all
from megatron.zero_bubble.schedule import Timeline, iteration_time, simulate, with_post_validation

FILL = 2
"""Number of unmeasured iterations at the start of a turn; from the third iteration on, iterations take the same
time."""
FOLLOWING = 5
"""Number of measured iterations of a turn."""


@dataclass(frozen=True, kw_only=True)
class IterationResult(Result):
    """Times of one schedule with or without post-validation, in milliseconds; a step is a turn of iterations."""

    post_validation: bool
    optimizer_reduction: float
    """Measured time of the reduction for which the optimizer waits, if all ranks start the reduction at the same
    time."""

    @property
    def simulated(self) -> float:
        """The simulated time from one iteration to the next, without the optimizer's reduction."""
        return float(iteration_time(self.timeline.schedule, self.timeline.costs))

    @property
    def expected(self) -> float:
        """The simulated time of an iteration, plus the optimizer's reduction if the next iteration waits for it."""
        return self.simulated + (0.0 if self.post_validation else self.optimizer_reduction)

    @property
    def makespans(self) -> list[float]:
        """Turn -> mean time from the end of an iteration to the end of the next, each on its last rank."""
        ends = [max(rank.returned for rank in ranks) for ranks in self.steps]
        length = FILL + FOLLOWING
        turns = [ends[first : first + length] for first in range(0, len(ends), length)]
        return [1e3 * (turn[-1] - turn[FILL - 1]) / FOLLOWING for turn in turns]

    def as_json(self) -> dict[str, Any]:
        ours = {"post_validation": self.post_validation, "optimizer_reduction_ms": self.optimizer_reduction}
        return super().as_json() | ours


def emulate_iterations(flags: EmulationFlags) -> list[IterationResult]:
    """Run every schedule that the flags name, first without and then with post-validation.

    Raises:
        ScheduleError: a schedule is unknown, or impossible with the sizes in the flags.
    """
    plans = [one.timeline for one in figures_of_all(flags, flags.schedule, flags.memory_limit, leaves_out_slow=True)]
    validated = [_with_post_validation(plan) for plan in plans]
    both = [plan for pair in zip(plans, validated, strict=True) for plan in pair]
    longest = max(float(plan.makespan) for plan in plans) * (FILL + FOLLOWING)
    job = make_job(both, flags.steps, longest, flags.activation_bytes, flags.receive_ahead)
    job = replace(job, iterations=FILL + FOLLOWING)
    total = (1 + job.steps * job.iterations) * sum(float(plan.makespan) for plan in both) / 1e3
    print(f"schedules: {len(plans)}, turns of each with and without: {job.steps}, about {total:.0f} s", file=sys.stderr)
    return list(_results(plans, validated, run_job(job)))


def _with_post_validation(plan: Timeline) -> Timeline:
    schedule = with_post_validation(plan.schedule, plan.costs)
    return simulate(replace(schedule, name=f"{schedule.name} with post-validation"), plan.costs)


def _results(plans: Sequence[Timeline], validated: Sequence[Timeline], records: Records) -> Iterator[IterationResult]:
    reduction = 1e3 * median(records.reductions)
    for plain, with_it in zip(plans, validated, strict=True):
        for timeline in (plain, with_it):
            yield IterationResult(
                plain.schedule.name,
                timeline,
                records.steps[timeline.schedule.name],
                post_validation=timeline is with_it,
                optimizer_reduction=reduction,
            )


def iteration_table(results: Sequence[IterationResult], *, markdown: bool = False) -> str:
    """Return a table with a row for each schedule: both measured times, both simulated times, and the gain."""
    heads = (
        *("schedule", "with (ms)", "spread", "simulated", "above simulated"),
        *("without (ms)", "spread", "makespan", "+ reduction", "above simulated", "gain", "simulated"),
    )
    rows = []
    for without, with_it in zip(results[::2], results[1::2], strict=True):
        assert without.name == with_it.name
        rows.append(
            (
                without.name,
                *(f"{with_it.measured:.1f}", _spread(with_it), f"{with_it.simulated:.1f}", _over(with_it)),
                *(f"{without.measured:.1f}", _spread(without), f"{without.simulated:.1f}"),
                *(f"{without.optimizer_reduction:.1f}", _over(without)),
                f"{100 * (without.measured / with_it.measured - 1):+.1f}%",
                f"{100 * (without.simulated / with_it.simulated - 1):+.1f}%",
            )
        )
    return table(heads, rows, markdown=markdown)


def _spread(one: IterationResult) -> str:
    return f"{max(one.makespans) - min(one.makespans):.1f}"


def _over(one: IterationResult) -> str:
    return f"{100 * (one.measured / one.expected - 1):+.1f}%"
