"""How a command ends: its result is printed or written, a mistake costs one line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from megatron.zero_bubble.job.files import write_file
from megatron.zero_bubble.schedule.errors import one_line


def run_command(prog: str, body: Callable[[], bool | None]) -> int:
    """Run a command and report its error, if it has one, in one line that begins with `prog`.

    Returns:
        The exit status: 2 for a user's mistake, 1 if something failed or `body` returns False, 130 after Ctrl-C.
    """
    try:
        return 1 if body() is False else 0
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"{prog}: error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def deliver(text: str, output: Path | None) -> None:
    """Print `text`, or write it to `output`, which appears complete or not at all if it is a regular file.

    A reader of the standard output that goes away, such as `head`, has seen enough, which is no error.
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
        # What could not be written is tried once more at the end of the program, and would be reported there again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise
