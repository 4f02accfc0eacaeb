"""An iterator that can show its next items without consuming them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


class LookAhead(Iterator[T]):
    """An iterator that can also show the next items of an iterable without consuming the items.

    If the training data is a `LookAhead`, the next step is planned while the current step runs, from the lengths of the
    next step's microbatches. All steps have to use the same `LookAhead`.

    Args:
        items: the iterable; each item is read when it is first shown or taken.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._source = iter(items)
        self._seen: deque[T] = deque()

    def __next__(self) -> T:
        return self._seen.popleft() if self._seen else next(self._source)

    def peek(self, count: int) -> list[T]:
        """Return the next `count` items, or fewer at the end of the iterable, without consuming the items."""
        self._seen.extend(islice(self._source, max(0, count - len(self._seen))))
        return list(islice(self._seen, count))
