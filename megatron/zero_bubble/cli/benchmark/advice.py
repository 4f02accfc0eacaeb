"""Writes a recommendation for one of the schedules that `zero-bubble benchmark` measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megatron.zero_bubble.cli.benchmark.training_results import TrainResult, bootstrap_interval

FEWEST_ROUNDS, FEWEST_ITERATIONS = 3, 5
"""Minimum number of rounds, and of measured iterations per training run, for the benchmark to recommend a schedule."""
_MIB = 2**20


def advice(results: Sequence[TrainResult], iterations: int) -> str:
    """Return a text that recommends a schedule, with its speedup over every other schedule and its memory.

    In each round, the benchmark trains once under every schedule. The speedup of one schedule over another is the
    median, over all rounds, of the ratio of their speeds in the round. A schedule other than megatron-core's 1F1B is
    recommended only if the 95% confidence interval of its speedup over 1F1B lies above 1. The text also names the
    schedules that are not significantly slower than the fastest schedule.

    Args:
        results: one result for each schedule, with megatron-core's 1F1B first.
        iterations: number of iterations that the benchmark measures in each training run.
    """
    best = max(results, key=lambda result: result.ratio)
    others = sorted((result for result in results if result is not best), key=lambda result: -result.ratio)
    intervals = [bootstrap_interval(best.ratios_to(other)) for other in others]
    baseline, rounds = results[0], len(best.rounds)
    flags = " ".join(best.contestant.words)
    how = f" ({flags})" if flags and flags != best.contestant.name else ""
    speed = f"{best.contestant.name}{how}: {_times_as_fast(best, others, intervals)}"
    kind = "fullest GPU" if best.is_device_memory else "largest process, its libraries included,"
    than = "" if best is baseline else f", {baseline.contestant.name}'s {baseline.peak_bytes / _MIB:.0f}"
    memory = f"Its {kind} takes {best.peak_bytes / _MIB:.0f} MiB{than}."
    if rounds < FEWEST_ROUNDS or iterations < FEWEST_ITERATIONS:
        return (
            f"A trial, after which no schedule is recommended: {_plural(rounds, 'round')} of "
            f"{_plural(iterations, 'iteration')}. At least --rounds {FEWEST_ROUNDS} and --iterations "
            f"{FEWEST_ITERATIONS} give an interval.\nThe fastest schedule was {speed}.\n{memory}"
        )
    close = [other for other, ends in zip(others, intervals, strict=True) if ends is None or ends[0] <= 1]
    names = " and ".join(other.contestant.name for other in close)
    if baseline in close:
        lines = [f"No schedule is significantly faster than {baseline.contestant.name}. The fastest was {speed}."]
    else:
        lines = [f"Use {speed}."]
    if close:
        lines.append(f"The difference from {names} is not significant: give more --rounds.")
    return "\n".join([*lines, memory])


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _times_as_fast(
    best: TrainResult, others: Sequence[TrainResult], intervals: Sequence[tuple[float, float] | None]
) -> str:
    """Return text with the speedup of `best` over each result in `others`, and with its 95% confidence interval."""
    parts = []
    for other, interval in zip(others, intervals, strict=True):
        bounds = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        parts.append(f"{median(best.ratios_to(other)):.2f}{bounds} times as fast as {other.contestant.name}")
    return ", ".join(parts) or "nothing else ran"
