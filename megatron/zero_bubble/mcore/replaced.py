"""Replaces an attribute of megatron-core or torch temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace the attribute `name` of `owner` inside the `with` block."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
