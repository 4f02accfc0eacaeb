"""Reading schedules of any format, writing whole files or nothing."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from megatron.zero_bubble.schedule import Schedule, ScheduleError
from megatron.zero_bubble.schedule.serialize import schedule_from_text


def read_schedule(path: Path) -> Schedule:
    """The schedule in `path`, in any format."""
    try:
        return schedule_from_text(path.read_text(encoding="utf-8"), name=path.stem)
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: {error}") from None


def deliver(text: str, output: Path | None) -> None:
    """Print `text`, or write it to `output`, which appears complete or not at all."""
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        _write(text, output)
    except OSError as error:
        raise OSError(f"cannot write {output}: {error.strerror}") from None


def _write(text: str, output: Path) -> None:
    handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, output)
    except BaseException:
        os.unlink(name)
        raise
