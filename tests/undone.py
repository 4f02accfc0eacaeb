"""Counts the steps that a training really undoes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def counted_undos() -> Iterator[Callable[[], int]]:
    """Within, how many steps snapshots have undone on this rank so far."""
    # Only now: it imports torch's CUDA, which a test may have to stand in for first.
    from megatron.zero_bubble.runtime.rollback import Snapshot

    undo, count = Snapshot.undo, 0

    def counted_undo(self: Snapshot) -> None:
        nonlocal count
        count += 1
        undo(self)

    Snapshot.undo = counted_undo
    try:
        yield lambda: count
    finally:
        Snapshot.undo = undo
