"""The flags of benchmarks/emulate.py; those of a schedule are zero-bubble schedule's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron.zero_bubble.cli.schedule.arguments import (
    Parser,
    add_costs,
    add_limit,
    add_post_validation,
    add_size,
    at_least,
    check_costs,
    join_negative,
    positive,
)
from megatron.zero_bubble.schedule.lower import RECEIVE_AHEAD

DEFAULT_TIME = 20.0
"""Of F, B and W each: milliseconds."""


def parse_arguments(argv: list[str] | None, description: str) -> argparse.Namespace:
    """Parse, or exit with status 2 and one line."""
    parser = Parser(
        prog="benchmarks.emulate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--mode",
        choices=("emulate", "train"),
        default="emulate",
        help="emulate: compute is replaced by sleeps; train: pretrain_gpt.py runs (flags: --mode train --help)",
    )
    parser.add_argument(
        "--schedule", action="append", metavar="NAME", help="repeat for more (default: all but optimal)"
    )
    parser.add_argument("--peers", action="store_true", help="run torch.distributed.pipelining's schedules as well")
    parser.add_argument("--steps", type=at_least(1), default=5, metavar="N", help="measured steps of each (default 5)")
    parser.add_argument(
        "--activation-bytes",
        type=at_least(16),
        default=65536,
        metavar="BYTES",
        help="size of a message between stages (default 65536)",
    )
    parser.add_argument(
        "--receive-ahead",
        type=at_least(0),
        default=RECEIVE_AHEAD,
        metavar="N",
        help=f"compute operations between posting a receive and using it (default {RECEIVE_AHEAD})",
    )
    parser.add_argument(
        "--data-parallel-size", type=at_least(1), default=1, metavar="N", help="replicas of the pipeline (default 1)"
    )
    parser.add_argument(
        "--time-reduce",
        type=positive,
        metavar="MS",
        help="reduce the gradients of a rank over the replicas, which takes so long",
    )
    parser.add_argument(
        "--buckets", type=at_least(1), default=10, metavar="N", help="in which the gradients are reduced (default 10)"
    )
    parser.add_argument(
        "--profile-output",
        type=Path,
        metavar="FILE",
        help="write the measured times of the schedule, of which there must be one: --costs FILE reads them",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="DIR", help="draw the median step of every schedule there, beside the plan"
    )
    add_post_validation(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of printing")
    add_size(parser, required=True)
    add_costs(parser, default_time=f"{DEFAULT_TIME:g}")
    add_limit(parser)
    arguments = parser.parse_args(join_negative(sys.argv[1:] if argv is None else argv))
    _check(parser, arguments)
    if arguments.costs is None:
        for flag in ("time_f", "time_b", "time_w"):
            if getattr(arguments, flag) is None:
                setattr(arguments, flag, (DEFAULT_TIME,))
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """What flags mean for each other."""
    check_costs(parser, arguments)
    if arguments.profile_output is not None and len(arguments.schedule or ()) != 1:
        parser.error("argument --profile-output: give one --schedule, whose placement the profile is of")
    if not arguments.overlap:
        parser.error("argument --no-overlap-communication: messages always overlap with compute here")
    if (arguments.data_parallel_size > 1) != (arguments.time_reduce is not None):
        parser.error("argument --time-reduce: it needs --data-parallel-size of at least 2, and replicas need it")
    for name in ("profile_output", "timeline"):
        if getattr(arguments, name) is not None and arguments.time_reduce is not None:
            parser.error(f"argument --{name.replace('_', '-')}: of one pipeline: leave out --time-reduce")
    if arguments.peers and arguments.time_reduce is not None:
        parser.error("argument --peers: their gradients are not reduced here: leave out --time-reduce")
    for name in ("peers", "time_reduce", "profile_output", "timeline"):
        if arguments.post_validation and getattr(arguments, name):
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"argument {flag}: not with --post-validation, which compares our schedules with themselves")
