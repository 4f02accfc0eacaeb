"""The flags of zero-bubble check."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from megatron.zero_bubble.cli.check.matrix import NAMES
from megatron.zero_bubble.cli.check.models import PROG, SIZES
from megatron.zero_bubble.cli.schedule.arguments import Parser, at_least, positive

PARTS = ("numerics", "stages", "ranks")


def parse_arguments(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """Parse, or exit with status 2 and one line."""
    parser = Parser(
        prog=PROG, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the check itself")
    parser.add_argument("--size", choices=tuple(SIZES), default="paper", help="of the models (default: the paper's)")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part of the check; repeat for more")
    parser.add_argument("--model", metavar="NAME", help="a stage of this model only")
    parser.add_argument(
        "--cell", action="append", choices=NAMES, help="a training of the ranks' matrix; repeat for more (default: all)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, metavar="N", help="steps that are timed (default 5)")
    parser.add_argument(
        "--time-limit",
        type=positive,
        default=180,
        metavar="SECONDS",
        help="that a training of several ranks may take (default 180)",
    )
    parser.add_argument(
        "--interconnect-bandwidth",
        type=positive,
        default=25,
        metavar="X",
        help="GB/s of the messages in the predictions (default 25)",
    )
    parser.add_argument(
        "--megatron-core",
        type=Path,
        metavar="PATH",
        help="its wheel, or the folder that holds megatron/core, where it is not installed",
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("gpu-check.json"),
        metavar="FILE",
        help="for everything that was found, as JSON: the file to send in (default: gpu-check.json)",
    )
    arguments = parser.parse_args(argv)
    names = [model.name for model in SIZES[arguments.size]]
    if arguments.model is not None and arguments.model not in names:
        parser.error(f"argument --model: {arguments.model} is not one of {', '.join(names)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu --size tiny tries the check on a CPU")
    if arguments.device == "cpu" and torch.cuda.is_available():
        parser.error("argument --device cpu: megatron-core takes the GPU that is here; hide it, CUDA_VISIBLE_DEVICES=")
    _check_output(parser, arguments.output)
    return arguments


def _check_output(parser: Parser, output: Path) -> None:
    """Before anything is measured: what was found would be lost."""
    folder = output.parent
    if not folder.is_dir():
        parser.error(f"argument --output: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        parser.error(f"argument --output: no permission to write to {folder}")
    if output.is_dir():
        parser.error(f"argument --output: {output} is a folder; name a file")
