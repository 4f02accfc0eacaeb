"""What the runtime adds to the compute: the executor, the split of B and W, communication that is not hidden.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --rounds 40 --json

An operation of the executor is timed without compute and without a network, one rank after the other (four ranks,
eight microbatches). B + W run on whole models of megatron-core's, in turn with the backward of the same model that
was not split; the models have the quickstart's architecture, and the smaller one is the quickstart. Both are
processor time of one thread, which other processes of the machine do not add to. Communication is exposed where an
operation waits for a message that has been sent: real messages over gloo between processes whose compute
sleeps, every rank a value.

A mistake ends with one line and exit status 2, a missed target with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.overhead_rows import SIZES, Row, communication_rows, executor_rows, overhead_table, split_rows
from megatron.zero_bubble.cli.output import deliver
from megatron.zero_bubble.cli.schedule.arguments import Parser, at_least


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="benchmarks.overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=at_least(2), default=20, metavar="N", help="of B + W (default 20)")
    parser.add_argument("--steps", type=at_least(1), default=5, metavar="N", help="of the others (default 5)")
    parser.add_argument("--model", choices=[size.name for size in SIZES], help="one of the models only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of printing")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> list[Row]:
    sizes = [size for size in SIZES if arguments.model in (None, size.name)]
    rows = list(executor_rows(arguments.steps))
    rows += communication_rows(sizes, arguments.steps)
    rows += split_rows(sizes, arguments.rounds)
    return rows


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    warnings.filterwarnings("ignore", category=UserWarning)  # megatron-core's, about what a CPU has not
    torch.set_num_threads(1)
    rows = measure(arguments)
    if arguments.json:
        text = json.dumps([row.as_json() for row in rows], indent=1) + "\n"
    else:
        text = overhead_table(rows, markdown=arguments.markdown)
    try:
        deliver(text, arguments.output)
    except OSError as error:
        print(f"benchmarks.overhead: error: {error}", file=sys.stderr)
        return 2
    missed = [row for row in rows if row.is_missed]
    for row in missed:
        print(f"over the target: {row.measure}, {row.case}: {row.value:.4g}, {row.target:g}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
