"""Tables for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Columns of one width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        if markdown:
            return f"| {' | '.join((first, *others))} |"
        return "  ".join((first, *others)).rstrip()

    rule = [("-" * widths[0]), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(heads), *([line(rule)] if markdown else []), *map(line, rows)]) + "\n"
