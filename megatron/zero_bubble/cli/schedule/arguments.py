"""The flags of zero-bubble schedule, and what single flags may hold; the other tools that take schedules share them."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron.zero_bubble.schedule import HardwareQueues, names
from megatron.zero_bubble.schedule.draw.drawing import MAX_WIDTH
from megatron.zero_bubble.schedule.lower import RECEIVE_AHEAD

SMALLEST, LARGEST = 1e-20, 1e20
"""Of what a number may be, unless it is zero: what is computed from them is far from the ends of floating point."""


class Parser(argparse.ArgumentParser):
    """A mistake costs one line, without the usage that argparse prints above it."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {word!r}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {word}")
    if value and not SMALLEST <= abs(value) <= LARGEST:
        raise argparse.ArgumentTypeError(f"expected a number from {SMALLEST:g} to {LARGEST:g}, got {word}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _numbers(at_least: float = -math.inf, above: float = -math.inf) -> Callable[[str], tuple[float, ...]]:
    """A parser of one number or a comma-separated list, all within the limits."""

    def parse(text: str) -> tuple[float, ...]:
        values = tuple(_number(word) for word in text.split(","))
        for value in values:
            if value <= above:
                raise argparse.ArgumentTypeError(f"must be above {above:g}, got {value}")
            if value < at_least:
                raise argparse.ArgumentTypeError(f"must not be below {at_least:g}, got {value}")
        return values

    return parse


def positive(word: str) -> float:
    [value, *more] = _numbers(above=0)(word)
    if more:
        raise argparse.ArgumentTypeError(f"expected one number, got {word!r}")
    return value


def at_least(smallest: int, largest: float = math.inf) -> Callable[[str], int]:
    """A parser of whole numbers from `smallest` on, up to `largest`."""

    def parse(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {word!r}") from None
        if value < smallest:
            raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
        if value > largest:
            raise argparse.ArgumentTypeError(f"must be at most {largest}, got {value}")
        return value

    return parse


def add_size(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The size of the pipeline."""
    group = parser.add_argument_group("the pipeline")
    group.add_argument("--pipeline-size", type=at_least(2), required=required, metavar="P", help="pipeline ranks")
    group.add_argument("--num-microbatches", type=at_least(1), required=required, metavar="M")
    group.add_argument(
        "--num-chunks", type=at_least(1), metavar="V", help="model chunks a rank, where there is a choice"
    )
    group.add_argument(
        "--microbatch-group-size",
        type=at_least(1),
        metavar="N",
        help="microbatches that an interleaved schedule takes through a chunk before the next (default: P)",
    )


def add_costs(parser: argparse.ArgumentParser, *, default_time: str = "1") -> None:
    """The costs that `rank_costs.stage_costs` reads; check them with `check_costs`."""
    group = parser.add_argument_group(
        "costs of a whole rank, all its chunks together: one number, or a comma list with one a rank"
    )
    for letter, what in (("f", "forward"), ("b", "gradient of the input"), ("w", "gradient of the weights")):
        group.add_argument(
            f"--time-{letter}",
            type=_numbers(above=0),
            metavar="T",
            help=f"time of {what} of a microbatch (default {default_time})",
        )
    group.add_argument(
        "--time-comm",
        type=_numbers(at_least=0),
        metavar="T",
        help="time of a message; a list has one a pair of neighbouring ranks, P - 1 in all (default 0)",
    )
    for letter, default in (("f", "1"), ("b", "-0.5"), ("w", "-0.5")):
        group.add_argument(
            f"--memory-{letter}", type=_numbers(), metavar="D", help=f"change of memory by it (default {default})"
        )
    group.add_argument("--costs", type=Path, metavar="FILE", help="all of these, from a JSON file (docs/schedules.md)")
    group.add_argument(
        "--no-overlap-communication",
        dest="overlap",
        action="store_false",
        help="messages occupy the sender and the receiver",
    )


def add_limit(parser: argparse.ArgumentParser) -> None:
    """The limit of a rank's memory."""
    parser.add_argument(
        "--memory-limit",
        type=_numbers(above=0),
        metavar="L",
        help="in M_B, the memory of one microbatch between F and B on a whole rank: in units of --memory-f (of its "
        "largest entry); one number, or a comma list with one a rank",
    )


def add_post_validation(parser: argparse.ArgumentParser) -> None:
    """Whether the optimizer steps before the state of all gradients is known."""
    parser.add_argument(
        "--post-validation",
        action="store_true",
        help="step first and validate in the next warmup: iterations interlock (docs/post_validation.md)",
    )


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=1,
        metavar="N",
        help="iterations, one after the other; above 1 with post-validation only, without it none overlap (default 1)",
    )


def _add_hardware_queues(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware-queues",
        choices=[queues.value for queues in HardwareQueues],
        help="run on NCCL's streams, on GPUs with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) or with many; "
        "without it a message waits for nothing on its way",
    )


def _add_source(parser: argparse.ArgumentParser) -> None:
    """One schedule, by name or from a file."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(names())}")
    source.add_argument("--input", type=Path, metavar="FILE", help="a schedule in JSON, CSV or PyTorch's CSV")
    add_size(parser, required=False)
    add_costs(parser)
    add_limit(parser)


def parse_arguments(argv: list[str] | None, description: str) -> argparse.Namespace:
    """Parse, or exit with status 2 and one line."""
    parser = Parser(
        prog="zero-bubble schedule", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, what: str, *, json: bool = True, output: str = "write there instead of printing") -> Parser:
        command = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        if json:
            command.add_argument("--json", action="store_true", help="print JSON")
        if output:
            command.add_argument("--output", type=Path, metavar="FILE", help=output)
        return command

    add("list", "name all schedules")
    generate = add("generate", "make a schedule", json=False)
    _add_source(generate)
    generate.add_argument(
        "--format", choices=("grid", "json", "csv", "pytorch"), help="default: by the suffix of --output, else grid"
    )
    add_post_validation(generate)
    generate.add_argument("--lower", action="store_true", help="add sends and receives (json, pytorch)")
    generate.add_argument(
        "--receive-ahead",
        type=at_least(0),
        default=RECEIVE_AHEAD,
        metavar="N",
        help=f"for --lower (default {RECEIVE_AHEAD})",
    )
    simulate = add("simulate", "tell what a schedule costs")
    _add_source(simulate)
    add_post_validation(simulate)
    _add_steps(simulate)
    _add_hardware_queues(simulate)
    compare = add("compare", "tell what several schedules cost")
    compare.add_argument("--schedule", action="append", metavar="NAME", help="repeat for more (default: all)")
    compare.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    add_size(compare, required=True)
    add_costs(compare)
    add_limit(compare)
    add_post_validation(compare)
    _add_hardware_queues(compare)
    draw = add("draw", "draw a schedule", json=False, output="required; a .svg, a .html, or a .json for Perfetto")
    _add_source(draw)
    add_post_validation(draw)
    _add_steps(draw)
    _add_hardware_queues(draw)
    draw.add_argument("--title", help="default: the schedule's name")
    draw.add_argument(
        "--width", type=at_least(200, MAX_WIDTH), metavar="PIXELS", help="of an SVG or page (default: by its contents)"
    )
    draw.add_argument("--time-unit", metavar="UNIT", help="of the times that are given (default ms)")
    validate = add("validate", "prove that a schedule is complete, ordered and free of deadlock")
    _add_source(validate)
    curve = add(
        "memory-curve",
        "bubble rate over memory limits",
        output="a .svg: plot there as well; any other: write there instead of printing",
    )
    curve.add_argument("--schedule", action="append", metavar="NAME", help="repeat for more (default: auto)")
    add_size(curve, required=True)
    add_costs(curve)
    for flag, default, what in (("from", 0.5, "first"), ("to", 2.5, "last"), ("step", 0.125, "distance of")):
        curve.add_argument(
            f"--{flag}",
            type=positive,
            default=default,
            metavar="X",
            help=f"{what} limit, in P M_B (default {default})",
        )
    arguments = parser.parse_args(join_negative(sys.argv[1:] if argv is None else argv))
    _check(parser, arguments)
    return arguments


def join_negative(words: list[str]) -> list[str]:
    """`--memory-b -0.5,-1` as `--memory-b=-0.5,-1`: argparse takes a list that begins with a minus for a flag."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and re.match(r"-[\d.]", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """What flags mean for each other."""
    given = vars(arguments)
    if given.get("input") is not None:
        for flag in ("pipeline_size", "num_microbatches", "num_chunks", "microbatch_group_size", "memory_limit"):
            if given[flag] is not None:
                parser.error(f"argument --{flag.replace('_', '-')}: not allowed with --input, which says it")
    elif "input" in given:
        for flag in ("pipeline_size", "num_microbatches"):
            if given[flag] is None:
                parser.error(f"argument --{flag.replace('_', '-')} is required with --schedule")
    check_costs(parser, arguments)
    if given.get("hardware_queues") is not None and not arguments.overlap:
        parser.error("argument --hardware-queues: not allowed with --no-overlap-communication: messages overlap there")
    if arguments.command == "draw" and arguments.output is None:
        parser.error("argument --output is required: a .svg, a .html, or a .json for Perfetto")


def check_costs(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """A file has all costs: no flag may contradict it."""
    given = vars(arguments)
    if given.get("costs") is not None:
        for flag in ("time_f", "time_b", "time_w", "time_comm", "memory_f", "memory_b", "memory_w"):
            if given[flag] is not None:
                parser.error(f"argument --{flag.replace('_', '-')}: not allowed with --costs")
