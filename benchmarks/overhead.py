"""Measure the overhead of the runtime: the executor, the split into B and W, and exposed communication.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --rounds 40 --json

The time of the executor for each operation is measured without compute and without a network, one rank after the other
(four ranks, eight microbatches). B + W are timed on whole models of megatron-core, in turn with the fused backward of
the same model. The models have the architecture of the quickstart; the smaller model is the quickstart's model. The
executor and B + W are measured in processor time of one thread, so that other processes of the machine add nothing.
Communication is exposed while an operation waits for a message that was already sent. Exposed communication is measured
on each rank, with real messages over gloo between processes that sleep instead of computing.

A mistake in the flags ends the command with a one-line message and exit status 2. The exit status is 1 if a target is
missed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median, quantiles

import torch

from benchmarks.emulation.ranks import run_job
from benchmarks.emulation.worker import EmulatedJob
from benchmarks.executor_overhead import seconds_per_op
from benchmarks.split_price import ModelSize, Round, measure_split
from megatron.zero_bubble.cli.invocation import at_least, command
from megatron.zero_bubble.cli.output import table
from megatron.zero_bubble.cli.shared_flags import TableFlags
from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.schedule import StageCosts, lower
from megatron.zero_bubble.session.flag_parser import flag

NUM_RANKS, NUM_MICROBATCHES = 4, 8
TIME = 20.0
"""Milliseconds of F, of B and of W in the emulated runs."""
SIZES = (
    ModelSize("quickstart", 8, 128, 4, 128, 4),
    ModelSize("larger", 4, 512, 8, 256, 4),
)


@dataclass(frozen=True)
class OverheadFlags(TableFlags):
    """what is measured"""

    rounds: int = flag("measurements of B + W and of the fused backward", 20, parse=at_least(2), metavar="N")
    steps: int = flag("measured steps of the executor and of communication", 5, parse=at_least(1), metavar="N")
    model: str | None = flag("measure this model only", None, choices=[size.name for size in SIZES])


@command("benchmarks.overhead", OverheadFlags, __doc__)
def main(flags: OverheadFlags) -> bool:
    """Run all measurements, print their table, and return whether every target was met."""
    warnings.filterwarnings("ignore", category=UserWarning)  # megatron-core warns of what a CPU lacks
    torch.set_num_threads(1)
    sizes = [size for size in SIZES if flags.model in (None, size.name)]
    rows = [
        *executor_rows(flags.steps),
        *communication_rows(sizes, flags.steps),
        *split_rows(sizes, flags.rounds),
    ]
    flags.deliver([asdict(row) for row in rows], overhead_table(rows, markdown=flags.markdown))
    missed = [row for row in rows if row.is_missed]
    for row in missed:
        print(f"above the target {row.target:g}: {row.measure}, {row.case}: {row.value:.4g}", file=sys.stderr)
    return not missed


@dataclass(frozen=True)
class OverheadRow:
    """One row of the table: the median (`value`) and the quartiles (`low`, `high`) of a measurement."""

    measure: str
    case: str
    unit: str
    value: float
    low: float
    high: float
    target: float | None = None

    @property
    def is_missed(self) -> bool:
        return self.target is not None and self.value > self.target


def make_row(measure: str, case: str, unit: str, values: Sequence[float], target: float | None = None) -> OverheadRow:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return OverheadRow(measure, case, unit, median(values), low, high, target)


def executor_rows(steps: int) -> Iterator[OverheadRow]:
    """Measure the executor's own time for an operation, and the added time of recording, under three schedules."""
    for name in ("1f1b", "zb-h1", "interleaved-zb"):
        values = seconds_per_op(lower(generate(name, NUM_RANKS, NUM_MICROBATCHES)), steps)
        yield make_row("executor, per operation", name, "µs", [1e6 * plain for plain, _ in values], target=100)
        recording = [1e6 * (recorded - plain) for plain, recorded in values]
        yield make_row("recording an operation", name, "µs", recording)


def split_rows(sizes: Sequence[ModelSize], rounds: int) -> Iterator[OverheadRow]:
    for size in sizes:
        print(f"B + W against the fused backward: {size.name}, {rounds} rounds", file=sys.stderr)
        measured = measure_split(size, rounds)
        case = f"{size.name}: {size.num_layers} layers, hidden {size.hidden_size}, {size.seq_length} tokens"
        yield make_row("fused backward", case, "ms", [1e3 * one.fused for one in measured])
        yield make_row("B", case, "ms", [1e3 * one.b for one in measured])
        yield make_row("W", case, "ms", [1e3 * one.w for one in measured])
        yield _price(case, measured)


def _price(case: str, measured: Sequence[Round]) -> OverheadRow:
    return make_row("B + W / fused backward", case, "ratio", [one.price for one in measured], target=1.03)


def communication_rows(sizes: Sequence[ModelSize], steps: int) -> Iterator[OverheadRow]:
    """Measure exposed communication of zb-h1 with emulated compute, for messages of the sizes in the models `sizes`."""
    costs = StageCosts.uniform(NUM_RANKS, TIME, TIME, TIME)
    schedule = lower(generate("zb-h1", NUM_RANKS, NUM_MICROBATCHES, costs=costs))
    for size in sizes:
        message = 4 * size.micro_batch_size * size.seq_length * size.hidden_size
        print(f"exposed communication: messages of {message} bytes, {steps} steps", file=sys.stderr)
        job = EmulatedJob(NUM_RANKS, ((schedule, costs),), steps, message, timedelta(minutes=1))
        found = run_job(job)
        ranks = [records for step in found.steps[schedule.name] for records in step]
        case = f"zb-h1, F = B = W = {TIME:g} ms, messages of {message >> 10} KiB"
        shares = [100 * (one.exposed or 0.0) / (one.returned - one.start) for one in ranks]
        yield make_row("exposed communication", case, "% of a step", shares)
        busy = [1e6 * one.busy / len(schedule.ops[k % NUM_RANKS]) for k, one in enumerate(ranks)]
        yield make_row("executor and gloo, per operation", case, "µs", busy)
        gathers = [1e3 * seconds for seconds in found.gathers]
        yield make_row("gathering the bubble rate, per log line", f"{NUM_RANKS} ranks", "ms", gathers)


def overhead_table(rows: Sequence[OverheadRow], *, markdown: bool = False) -> str:
    heads = ("measure", "median", "quartiles", "unit", "target")
    cells = [
        (
            f"{row.measure} ({row.case})",
            f"{row.value:.4g}",
            f"{row.low:.4g} .. {row.high:.4g}",
            row.unit,
            "" if row.target is None else f"{row.target:g}",
        )
        for row in rows
    ]
    return table(heads, cells, markdown=markdown)


if __name__ == "__main__":
    sys.exit(main())
