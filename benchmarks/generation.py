"""How fast schedules are made: generate, lower and validate, one core, seconds.

    python -m benchmarks.generation                     all schedules, p x m = 8x64, 16x128, 32x256, 64x512
    python -m benchmarks.generation --schedule zb-h1 --size 32x256

The costs are the published times of the 28.3B model (Qi et al. 2024). Work that grows linearly shows
as a last column, microseconds an operation, that stays the same down the sizes. Exit status 1 if a schedule
misses a limit: 3 s in all for 32x256, 15 s for 64x512.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise

from megatron.zero_bubble.cli.tables import table
from megatron.zero_bubble.schedule import (
    Schedule,
    ScheduleError,
    StageCosts,
    generate,
    lower,
    names,
    placement_for,
    validate,
)

SIZES = ((8, 64), (16, 128), (32, 256), (64, 512))
LIMITS = {(32, 256): 3.0, (64, 512): 15.0}


def published_costs(name: str, num_ranks: int) -> StageCosts:
    """The times of the 28.3B model in milliseconds, a rank's work in equal parts for its chunks, memory in M_B."""
    placement = placement_for(name, num_ranks)
    chunks = placement.num_chunks
    times = (10.402 / chunks, 10.248 / chunks, 7.698 / chunks)
    return StageCosts.uniform(placement.num_stages, *times, 0.46, 1 / chunks, -0.5 / chunks, -0.5 / chunks)


def measure(name: str, num_ranks: int, num_microbatches: int) -> tuple[Schedule, list[float]]:
    """The lowered schedule, and the seconds that each of the three steps took."""
    costs = published_costs(name, num_ranks)
    times = [time.perf_counter()]
    schedule = generate(name, num_ranks, num_microbatches, costs=costs)
    times.append(time.perf_counter())
    lowered = lower(schedule)
    times.append(time.perf_counter())
    validate(lowered)
    times.append(time.perf_counter())
    return lowered, [after - before for before, after in pairwise(times)]


def _size(word: str) -> tuple[int, int]:
    ranks, _, microbatches = word.partition("x")
    if not (ranks.isdigit() and microbatches.isdigit()):
        raise argparse.ArgumentTypeError(f"expected ranks x microbatches, as in 32x256, got {word!r}")
    return int(ranks), int(microbatches)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", action="append", metavar="NAME", help="repeat for more (default: all)")
    parser.add_argument("--size", action="append", type=_size, metavar="PxM", help="repeat for more")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    rows, missed = [], []
    for name in arguments.schedule or [name for name in names() if name != "optimal"]:
        for size in arguments.size or SIZES:
            try:
                lowered, seconds = measure(name, *size)
            except ScheduleError as error:
                print(f"benchmarks.generation: error: {error}", file=sys.stderr)
                return 2
            total, num_ops = sum(seconds), sum(map(len, lowered.ops))
            shown = (f"{value:.2f}" for value in (*seconds, total))
            rows.append((name, f"{size[0]} x {size[1]}", str(num_ops), *shown, f"{total / num_ops * 1e6:.1f}"))
            print(f"{name} {size[0]}x{size[1]}: {total:.2f} s", file=sys.stderr)
            if total > LIMITS.get(size, float("inf")):
                missed.append(f"{name} {size[0]}x{size[1]}: {total:.2f} s, limit {LIMITS[size]} s")
    heads = ("schedule", "p x m", "operations", "generate", "lower", "validate", "all (s)", "µs an operation")
    print(table(heads, rows, markdown=arguments.markdown), end="")
    for line in missed:
        print(f"over the limit: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
