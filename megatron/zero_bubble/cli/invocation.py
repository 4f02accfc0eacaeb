"""Reads the flags of a command and their values, and turns the command's result or error into an exit status."""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields
from functools import wraps
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

from megatron.zero_bubble.cli.output import deliver
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.session.flag_parser import FlagParser, add_flags, title_of

T = TypeVar("T")


@dataclass(frozen=True)
class FollowingFlags:
    """Flags of `pretrain_gpt.py` that follow `--` on the command line; the training itself parses them."""

    following: ClassVar[str] = "<pretrain_gpt.py's flags>"
    """Text after `--` in the usage line of the command."""
    training_flags: tuple[str, ...] = ()


def run_command(prog: str, body: Callable[[], bool | None]) -> int:
    """Call the function `body` of a command, and print an error as one line that begins with the program name `prog`.

    Returns:
        The exit status: 0 after success, 1 after a failure or if `body` returns False, 2 after a user's mistake, 130
        after Ctrl-C.
    """
    try:
        return 1 if body() is False else 0
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{prog}: error: {one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    except KeyboardInterrupt:
        return 130


def raise_on_sigterm() -> None:
    """Let SIGTERM raise `SystemExit`, so that temporary files are removed and training runs of the command end."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def command(
    prog: str, arguments: type[T], description: str | None
) -> Callable[[Callable[[T], bool | None]], Callable[..., int]]:
    """Return a decorator that turns a function of a command's flags into the `main` of the command.

    `main` parses a list of words, by default the words of the command line, calls the function, and returns the exit
    status of `run_command`. The arguments of `command` are arguments of `read_flags`.
    """

    def decorate(body: Callable[[T], bool | None]) -> Callable[..., int]:
        @wraps(body)
        def main(argv: Sequence[str] | None = None) -> int:
            words = sys.argv[1:] if argv is None else argv
            return run_command(prog, lambda: body(read_flags(arguments, words, prog, description or "")))

        return main

    return decorate


class _CommandParser(FlagParser):
    """A parser that raises `OSError` if `--help` cannot write the help; argparse's own parser raises no error."""

    def print_help(self, file: Any = None) -> None:
        deliver(self.format_help(), None)


def read_flags(arguments: type[T], argv: Sequence[str], prog: str, description: str, *, has_help: bool = True) -> T:
    """Parse a command's flags into the frozen dataclass `arguments`.

    Args:
        arguments: a dataclass whose fields are flags; `--help` groups the flags by the class that defines them.
        prog: the name of the command, printed in the usage.
        description: the text that `--help` prints.
        has_help: whether `--help` prints the help and exits; otherwise `--help` is an unknown flag.

    Raises:
        ValueError: a flag is unknown, missing or wrong; the message is one line.
        OSError: the help cannot be written.
    """
    words, more, usage = list(argv), {}, None
    if issubclass(arguments, FollowingFlags):
        cut = words.index("--") if "--" in words else len(words)
        words, more = words[:cut], {"training_flags": tuple(words[cut + 1 :])}
        usage = f"%(prog)s [flags] -- {arguments.following}"
    parser = _CommandParser(
        add_help=has_help,
        prog=prog,
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title, entries in _flags_by_title(arguments).items():
        add_flags(parser.add_argument_group(title), arguments, entries)
    return arguments(**vars(parser.parse_args(_join_negative(words))), **more)


def _flags_by_title(arguments: type) -> dict[str, list[Field[Any]]]:
    """Group the flags of `arguments` by the titles of the defining classes; flags of `arguments` itself come first."""
    # If a subclass declares a flag anew, the flag keeps the title of the base class, which is later in the MRO.
    definers = {name: base for base in arguments.__mro__ for name in vars(base).get("__annotations__", ())}
    groups: dict[str, list[Field[Any]]] = {}
    for base in arguments.__mro__:
        for entry in fields(arguments):
            if entry.metadata and definers[entry.name] is base:
                groups.setdefault(title_of(base), []).append(entry)
    return groups


def _join_negative(words: Sequence[str]) -> list[str]:
    """Join `--memory-b -0.5,-1` to `--memory-b=-0.5,-1`, because argparse would read the word `-0.5,-1` as a flag."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and re.match(r"-[\d.]", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


_SMALLEST, _LARGEST = 1e-20, 1e20
"""Bounds for the absolute value of a nonzero number in a flag, so that results neither overflow nor underflow."""


def numbers(
    at_least: float = -math.inf, above: float = -math.inf, at_most: float = math.inf
) -> Callable[[str], tuple[float, ...]]:
    """Return a function that parses a comma-separated list of numbers and refuses numbers outside given bounds."""

    def parse(text: str) -> tuple[float, ...]:
        values = tuple(_parsed_number(word) for word in text.split(","))
        for value in values:
            if value <= above:
                raise argparse.ArgumentTypeError(f"must be above {above:g}, got {value}")
            if value < at_least:
                raise argparse.ArgumentTypeError(f"must not be below {at_least:g}, got {value}")
            if value > at_most:
                raise argparse.ArgumentTypeError(f"must not be above {at_most:g}, got {value}")
        return values

    return parse


def one_number(**bounds: float) -> Callable[[str], float]:
    """Return a function that parses one number and checks it against `bounds`, the keyword arguments of `numbers`."""

    def parse(word: str) -> float:
        value, *more = numbers(**bounds)(word)
        if more:
            raise argparse.ArgumentTypeError(f"expected one number, got {word!r}")
        return value

    return parse


positive = one_number(above=0)


def at_least(smallest: int, largest: float = math.inf) -> Callable[[str], int]:
    """Return a parser of whole numbers from `smallest` to `largest`."""

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


def _parsed_number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {word!r}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {word}")
    if value and not _SMALLEST <= abs(value) <= _LARGEST:
        raise argparse.ArgumentTypeError(f"expected a number from {_SMALLEST:g} to {_LARGEST:g}, got {word}")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def value_of(name: str, words: Sequence[str]) -> str | None:
    """Return the last value of the flag `name` in the command line `words`; None if the flag is not given."""
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return next((after for before, after in reversed([*pairwise(apart)]) if before == name), None)


def names_in(words: Sequence[str]) -> set[str]:
    """Return the names of all flags in the command line `words`, without the values of words such as `--name=value`."""
    return {word.split("=", 1)[0] for word in words if word.startswith("--")}


def unless_given(words: Sequence[str], name: str, *value: str) -> list[str]:
    """Return the flag `name` and its value as further words, or no words if the command line `words` has the flag."""
    return [] if name in names_in(words) else [name, *value]
