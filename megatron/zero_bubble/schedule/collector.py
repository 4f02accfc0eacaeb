"""Pauses Python's garbage collector while millions of small values are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause Python's garbage collector during a `with` block or a decorated function.

    The operations of a long schedule are millions of tuples without reference cycles. The garbage collector would visit
    all tuples of the schedule again and again, so that `lower` would take twice as long.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
