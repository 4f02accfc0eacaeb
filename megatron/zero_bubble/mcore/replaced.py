"""Replaces an attribute of megatron-core or torch temporarily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_ABSENT = object()


def set_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute, which `owner` may inherit or lack; return the function that restores the original state."""
    original = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    return partial(delattr, owner, name) if original is _ABSENT else partial(setattr, owner, name, original)


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace the attribute `name` of `owner` inside the `with` block."""
    restore = set_attribute(owner, name, replacement)
    try:
        yield
    finally:
        restore()
