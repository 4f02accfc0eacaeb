"""Formats tables, and prints or writes the results of a command."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from megatron.zero_bubble.session.files import write_file

T = TypeVar("T")


def deliver(text: str, output: Path | None) -> None:
    """Print `text`, or write it to the file `output`. A regular file is written completely or not at all.

    If a reader such as `head` closes the standard output early, the function raises no error.

    Raises:
        OSError: the text cannot be written; the message is one line.
    """
    try:
        if output is None:
            _print(text)
        else:
            write_file(output, text)
    except OSError as error:
        raise OSError(f"cannot write {output or 'to the standard output'}: {error.strerror}") from None


def _print(text: str) -> None:
    if sys.stdout is None:  # closed before this program began
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # At exit, Python flushes the rest of the text, and would report the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def percent(fraction: float) -> str:
    """Return a fraction as a percentage with two decimals; tiny negative fractions are written as 0.00%."""
    return f"{round(100 * float(fraction), 2) + 0.0:.2f}%"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Return a table as text, or as Markdown: the first column is aligned left, the other columns right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
        return f"| {' | '.join(aligned)} |" if markdown else "  ".join(aligned).rstrip()

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(heads), *([line(rule)] if markdown else []), *map(line, rows)]) + "\n"


def table_of(columns: Mapping[str, Callable[[T], str]], items: Iterable[T], *, markdown: bool = False) -> str:
    """Return a table with a row for each item; `columns` maps each heading to a function from an item to its cell."""
    return table(list(columns), [[cell(item) for cell in columns.values()] for item in items], markdown=markdown)
