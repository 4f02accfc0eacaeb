"""Measure how many seconds one core needs to generate, lower and validate each schedule.

    python -m benchmarks.generation                     all schedules, p x m = 8x64, 16x128, 32x256, 64x512
    python -m benchmarks.generation --schedule zb-h1 --size 32x256

The costs are the published times of the 28.3B model (Qi et al. 2024). The last column has the microseconds for each
operation, which are the same for all sizes if the time grows linearly with the number of operations. The exit status is
1 if a schedule takes longer than its limit: 3 s in total for 32x256, 15 s for 64x512.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.published import PUBLISHED, costs_of
from megatron.zero_bubble.cli.invocation import read_flags, run_command
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Schedule, lower, validate
from megatron.zero_bubble.session.flag_parser import flag

_PROG = "benchmarks.generation"
SIZES = ((8, 64), (16, 128), (32, 256), (64, 512))
LIMITS = {(32, 256): 3.0, (64, 512): 15.0}
HEADS = ("schedule", "p x m", "operations", "generate", "lower", "validate", "all (s)", "µs an operation")


def _size(word: str) -> tuple[int, int]:
    ranks, _, microbatches = word.partition("x")
    if not (ranks.isdigit() and microbatches.isdigit()):
        raise argparse.ArgumentTypeError(f"expected ranks x microbatches, as in 32x256, got {word!r}")
    return int(ranks), int(microbatches)


@dataclass(frozen=True)
class GenerationFlags(TableFlags):
    """what is measured"""

    schedule: list[str] | None = flag(
        "schedule to measure; repeat for more (default: all but optimal)", None, action="append", metavar="NAME"
    )
    size: list[tuple[int, int]] | None = flag(
        "ranks x microbatches; repeat for more", None, action="append", parse=_size, metavar="PxM"
    )


def measure(name: str, num_ranks: int, num_microbatches: int) -> tuple[Schedule, list[float]]:
    """Return the lowered schedule, and the seconds for generating, lowering and validating it."""
    costs = costs_of(name, num_ranks, PUBLISHED["28.3B"].times)
    times = [time.perf_counter()]
    schedule = generate(name, num_ranks, num_microbatches, costs=costs)
    times.append(time.perf_counter())
    lowered = lower(schedule)
    times.append(time.perf_counter())
    validate(lowered)
    times.append(time.perf_counter())
    return lowered, [after - before for before, after in pairwise(times)]


def main(argv: list[str] | None = None) -> int:
    return run_command(_PROG, lambda: _measure_all(sys.argv[1:] if argv is None else argv))


def _measure_all(argv: list[str]) -> bool:
    """Measure the schedules that the flags name, print the table, and return whether every schedule kept its limit."""
    flags = read_flags(GenerationFlags, argv, _PROG, __doc__ or "")
    rows, figures, missed = [], [], []
    for name in flags.schedule or [name for name, entry in ENTRIES.items() if not entry.is_slow]:
        for size in flags.size or SIZES:
            lowered, seconds = measure(name, *size)
            total, num_ops = sum(seconds), sum(map(len, lowered.ops))
            shown = (f"{value:.2f}" for value in (*seconds, total))
            rows.append((name, f"{size[0]} x {size[1]}", str(num_ops), *shown, f"{total / num_ops * 1e6:.1f}"))
            figures.append({"schedule": name, "size": size, "operations": num_ops, "seconds": seconds})
            print(f"{name} {size[0]}x{size[1]}: {total:.2f} s", file=sys.stderr)
            if total > LIMITS.get(size, float("inf")):
                missed.append(f"{name} {size[0]}x{size[1]}: {total:.2f} s, limit {LIMITS[size]:g} s")
    flags.deliver(figures, table(HEADS, rows, markdown=flags.markdown))
    for line in missed:
        print(f"over the limit: {line}", file=sys.stderr)
    return not missed


if __name__ == "__main__":
    sys.exit(main())
