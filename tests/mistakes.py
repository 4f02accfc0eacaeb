"""How a command of ours refuses a mistake of its user."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def one_line_mistake(main: Callable[[Sequence[str]], int], flags: Sequence[str], capsys) -> str:
    """The one line that the command writes to stderr; it writes nothing else, and its status is 2."""
    try:
        status = main(flags)
    except SystemExit as exit:
        status = exit.code
    output, errors = capsys.readouterr()
    assert (status, output, errors.count("\n")) == (2, "", 1)
    return errors
