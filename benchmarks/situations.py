"""Measure the gain of --zero-bubble over megatron-core's own schedules, in five situations, with real compute.

    python -m benchmarks.situations
    python -m benchmarks.situations --situation 'large vocabulary' --num-microbatches 8

In each situation the same training runs in turns with megatron-core's 1F1B, with megatron-core's interleaved schedule
of two chunks a rank, and with --zero-bubble. `zero-bubble benchmark` starts the trainings, as a user would. In the
situation "full recomputation", the memory limit lets the plan restore the activations of two microbatches at a time. In
the situation "full recomputation, same memory", the processes take about as much memory as under megatron-core. In the
situation "memory short", megatron-core has to recompute all layers, while --zero-bubble chooses which activations to
recompute within a memory limit. The last columns compare turns of the same round, with a bootstrap interval over
rounds.

A mistake in the flags ends the command with a one-line message and exit status 2. The exit status is 1 if a training
fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.zero_bubble.cli.benchmark.arguments import BenchmarkFlags
from megatron.zero_bubble.cli.benchmark.contestants import CHOSEN, megatrons_interleaved
from megatron.zero_bubble.cli.benchmark.rounds import compare_trainings
from megatron.zero_bubble.cli.benchmark.training_results import TrainResult, bootstrap_interval
from megatron.zero_bubble.cli.invocation import at_least, command
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.session.flag_parser import flag

_MODEL = (
    *("--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "4", "--mock-data"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
)
_SMALL = ("--seq-length", "128", "--micro-batch-size", "4", "--vocab-size", "255")
_RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@dataclass(frozen=True)
class Situation:
    """Flags of a training, additional flags for `--zero-bubble`, and additional flags for megatron-core's schedules."""

    flags: tuple[str, ...]
    ours: tuple[str, ...] = ()
    megatrons: tuple[str, ...] = ()


SITUATIONS = {
    "small vocabulary": Situation(_SMALL),
    "large vocabulary": Situation(("--seq-length", "128", "--micro-batch-size", "1", "--vocab-size", "32767")),
    "full recomputation": Situation((*_SMALL, *_RECOMPUTED), ("--zero-bubble-memory-limit", "2")),
    "full recomputation, same memory": Situation((*_SMALL, *_RECOMPUTED), ("--zero-bubble-memory-limit", "0.35")),
    "memory short": Situation(
        _SMALL, ("--zero-bubble-recompute", "planned", "--zero-bubble-memory-limit", "0.7"), _RECOMPUTED
    ),
}


@dataclass(frozen=True)
class SituationFlags(TableFlags):
    """the trainings"""

    situation: list[str] | None = flag(
        "situation to measure; repeat for more (default: all)", None, action="append", choices=tuple(SITUATIONS)
    )
    pipeline_size: int = flag("pipeline ranks", 2, parse=at_least(2), metavar="P")
    num_microbatches: int = flag("microbatches of an iteration", 4, parse=at_least(1), metavar="M")
    rounds: int = flag("turns of every schedule", 5, parse=at_least(1), metavar="N")


@command("benchmarks.situations", SituationFlags, __doc__)
def main(flags: SituationFlags) -> None:
    results = {name: measured(SITUATIONS[name], flags) for name in flags.situation or SITUATIONS}
    document = {name: [result.as_json() for result in of_one] for name, of_one in results.items()}
    rows = [row for name, of_one in results.items() for row in rows_of(name, of_one)]
    heads = ("situation", "schedule", "iteration (ms)", "memory (MiB)", "to 1F1B", "95% interval")
    flags.deliver(document, table(heads, rows, markdown=flags.markdown))


def measured(situation: Situation, flags: SituationFlags) -> list[TrainResult]:
    """Train in turns; return the results of 1F1B, the planned schedule and megatron-core's interleaved schedule."""
    benchmark = BenchmarkFlags(
        pipeline_size=flags.pipeline_size,
        num_microbatches=flags.num_microbatches,
        schedule=[" ".join((CHOSEN, *situation.ours))],
        rounds=flags.rounds,
        warmup=16,
        iterations=8,
        interval=4,
        baseline_flags=list(situation.megatrons),
        training_flags=(*_MODEL, *situation.flags),
    )
    interleaved = megatrons_interleaved(benchmark, 2, "megatron-core interleaved, 2 chunks")
    return compare_trainings(benchmark, [replace(interleaved, words=(*interleaved.words, *situation.megatrons))])


def rows_of(name: str, results: Sequence[TrainResult]) -> list[tuple[str, ...]]:
    """Return the table rows of a situation; only the first row has the name of the situation."""
    rows: list[tuple[str, ...]] = []
    for number, result in enumerate(results):
        interval = bootstrap_interval(result.ratios_to(results[0])) if number else None
        words = " ".join(result.contestant.words) if result.contestant.name.startswith(CHOSEN) else ""
        rows.append(
            (
                "" if number else name,
                words or result.contestant.name,
                f"{result.measured:.1f}",
                f"{result.peak_bytes / 2**20:.0f}",
                f"{result.ratio:.3f}",
                f"{interval[0]:.3f} .. {interval[1]:.3f}" if interval else "",
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
