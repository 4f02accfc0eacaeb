"""The flags of `zero-bubble benchmark`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.zero_bubble.cli.schedule.arguments import Parser, add_size, at_least

DEFAULT_SCHEDULES = ("zb-h1", "zb-2p", "zb-v")
PROG = "zero-bubble benchmark"


def parse_train_arguments(
    argv: Sequence[str] | None, description: str, *, with_peers: bool = False
) -> argparse.Namespace:
    """Parse, or exit with status 2 and one line. What follows `--` is in `training_flags`, unread."""
    parser = Parser(
        prog=PROG,
        usage="%(prog)s [options] -- <pretrain_gpt.py's flags>",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--schedule",
        action="append",
        metavar="NAME",
        help="repeat for more; flags may follow within quotes: 'auto --zero-bubble-memory-limit 1.5' "
        f"(default: {', '.join(DEFAULT_SCHEDULES)})",
    )
    if with_peers:
        parser.add_argument(
            "--peers",
            action="store_true",
            help="run megatron-core's interleaved schedule and torch.distributed.pipelining's schedules as well",
        )
    counts = (
        ("rounds", 5, 1, "times that every schedule's turn comes"),
        ("warmup", 10, 7, "iterations of a turn that are not measured; a plan is made after the sixth"),
        ("iterations", 20, 1, "measured iterations of a turn"),
        ("interval", 5, 1, "iterations that are timed together"),
        ("timeout", 600, 1, "seconds that a turn may take"),
    )
    for name, default, smallest, what in counts:
        parser.add_argument(
            f"--{name}", type=at_least(smallest), default=default, metavar="N", help=f"{what} (default {default})"
        )
    parser.add_argument(
        "--launch",
        type=shlex.split,
        metavar="COMMAND",
        help="what starts a script on all ranks (default: torchrun on this machine)",
    )
    parser.add_argument(
        "--world-size", type=at_least(2), metavar="N", help="ranks that --launch starts (default: pipeline ranks)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of printing")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG: throughput over memory")
    add_size(parser, required=True)
    arguments = parser.parse_args(_own_words(argv))
    for name in ("warmup", "iterations"):
        if getattr(arguments, name) % arguments.interval:
            parser.error(f"argument --{name}: must be a multiple of --interval {arguments.interval}")
    arguments.training_flags = _training_words(argv)
    for flag in ("--pipeline-model-parallel-size", "--global-batch-size", "--train-iters", "--log-interval"):
        if flag in arguments.training_flags:
            parser.error(f"argument {flag}: not after --, the benchmark sets it")
    arguments.world_size = arguments.world_size or arguments.pipeline_size
    arguments.launch = arguments.launch or _torchrun(arguments.world_size)
    return arguments


def _own_words(argv: Sequence[str] | None) -> list[str]:
    words = list(sys.argv[1:] if argv is None else argv)
    return words[: words.index("--")] if "--" in words else words


def _training_words(argv: Sequence[str] | None) -> list[str]:
    words = list(sys.argv[1:] if argv is None else argv)
    return words[words.index("--") + 1 :] if "--" in words else []


def _torchrun(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def environment() -> dict[str, str]:
    """Of the trainings: on a CPU one thread a rank, for the ranks share the cores."""
    return dict(os.environ) if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1", **os.environ}
