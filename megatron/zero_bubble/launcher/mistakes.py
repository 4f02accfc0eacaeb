"""Exceptions for the user's mistakes, which end a launch with one line of explanation.

LauncherError     a flag, the script or its megatron-core does not fit
  HookError       a function that the launcher hooks is missing or has another signature
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LauncherError(ValueError):
    """The launch cannot work; the message says what to change."""


class HookError(LauncherError):
    """A function that the launcher hooks or calls is missing or has another signature."""


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Turn a `ValueError` of a check into a `LauncherError`, to tell it from one that the script's code raises."""
    try:
        yield
    except LauncherError:
        raise
    except ValueError as error:
        raise LauncherError(str(error)) from error
