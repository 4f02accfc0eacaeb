"""Parsers of the values of flags, which refuse values out of bounds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

_SMALLEST, _LARGEST = 1e-20, 1e20
"""Bounds of a number other than zero, so that results computed from such numbers neither overflow nor underflow."""


def numbers(at_least: float = -math.inf, above: float = -math.inf) -> Callable[[str], tuple[float, ...]]:
    """Return a parser of one number or a comma-separated list, all above `above` and at least `at_least`."""

    def parse(text: str) -> tuple[float, ...]:
        values = tuple(_parsed_number(word) for word in text.split(","))
        for value in values:
            if value <= above:
                raise argparse.ArgumentTypeError(f"must be above {above:g}, got {value}")
            if value < at_least:
                raise argparse.ArgumentTypeError(f"must not be below {at_least:g}, got {value}")
        return values

    return parse


def one_number(at_least: float = -math.inf, above: float = -math.inf) -> Callable[[str], float]:
    """Return a parser of one number above `above` and at least `at_least`."""

    def parse(word: str) -> float:
        value, *more = numbers(at_least, above)(word)
        if more:
            raise argparse.ArgumentTypeError(f"expected one number, got {word!r}")
        return value

    return parse


positive = one_number(above=0)
"""Parses one number above zero."""


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
