"""Says in words which of the schedules that `zero-bubble benchmark` measured to use."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.zero_bubble.cli.benchmark.training_results import TrainResult, bootstrap_interval

_MIB = 2**20


def advice(results: Sequence[TrainResult]) -> str:
    """Return which schedule to use, how many times as fast as each other one it is, and what memory it takes.

    The figures compare turns of the same round. Schedules that the rounds do not tell apart are named.
    """
    best = max(results, key=lambda result: result.ratio)
    others = [result for result in results if result is not best]
    baseline = results[0]
    flags = " ".join(best.contestant.words)
    how = f" ({flags})" if flags and flags != best.contestant.name else ""
    lines = [f"Use {best.contestant.name}{how}: {_times_as_fast(best, others)}."]
    close = [other.contestant.name for other in others if not _is_faster(best, other)]
    if close:
        lines.append(f"These rounds do not tell it from {' and '.join(close)}: more --rounds may.")
    kind = "fullest GPU" if best.is_device_memory else "largest process, its libraries included,"
    memory = f"Its {kind} takes {best.peak_bytes / _MIB:.0f} MiB"
    if best is not baseline:
        memory += f", {baseline.contestant.name}'s {baseline.peak_bytes / _MIB:.0f}"
    lines.append(f"{memory}.")
    return "\n".join(lines)


def _times_as_fast(best: TrainResult, others: Sequence[TrainResult]) -> str:
    """Return the comparison with every other result, the slowest last."""
    parts = []
    for other in sorted(others, key=lambda result: -result.ratio):
        interval = bootstrap_interval(best.ratios_to(other))
        bounds = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        parts.append(f"{best.ratio_to(other):.2f}{bounds} times as fast as {other.contestant.name}")
    return ", ".join(parts) or "nothing else ran"


def _is_faster(best: TrainResult, other: TrainResult) -> bool:
    """Whether all of the interval says that `best` is faster; with too few rounds for one, whether every round does."""
    ratios = best.ratios_to(other)
    interval = bootstrap_interval(ratios)
    return (interval[0] if interval else min(ratios)) > 1
