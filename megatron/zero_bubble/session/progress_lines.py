"""Says from time to time how far a search is, so that nobody takes it for a hang."""

from __future__ import annotations

import time
from collections.abc import Callable

SILENT_SECONDS = 2.0
"""Time without a line."""


class ProgressLines:
    """Calls `say` with a text if it has not been called for `SILENT_SECONDS`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last > SILENT_SECONDS:
            self._last = now
            self._say(text)
