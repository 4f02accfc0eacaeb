"""Reading schedules of any format, printing and writing results."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from megatron.zero_bubble.job.files import write_file
from megatron.zero_bubble.schedule import Schedule, ScheduleError
from megatron.zero_bubble.schedule.formats import schedule_from_text


def read_schedule(path: Path) -> Schedule:
    """The schedule in `path`, in any format."""
    try:
        return schedule_from_text(path.read_text(encoding="utf-8"), name=path.stem)
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: {error}") from None


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
