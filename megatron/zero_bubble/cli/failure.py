"""Why a training failed, in one line."""

from __future__ import annotations

import re


def failure_reason(log: str) -> str | None:
    """The line in which a training says what is wrong, or the last line of a traceback; None if there is neither."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if ": error: " in line:
            return line.split(": error: ", 1)[1]
    errors = [line for line in lines if re.search(r"^(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)]
    return errors[0] if errors else None
