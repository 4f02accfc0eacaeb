"""Reports the progress of a search from time to time, so that a long search is not mistaken for a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

SILENT_SECONDS = 2.0
"""Seconds without output after which a search prints a line about its progress."""


class ProgressLines:
    """Reports progress through the function `say`, with more than `SILENT_SECONDS` between two calls of `say`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last > SILENT_SECONDS:
            self._last = now
            self._say(text)


@contextmanager
def announced(name: str, num_microbatches: int) -> Iterator[None]:
    """Context for planning a schedule; prints a line if the planning takes longer than `SILENT_SECONDS`."""
    line = f" > planning schedule {name} for {num_microbatches} microbatches ..."
    timer = Timer(SILENT_SECONDS, print, [line], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
