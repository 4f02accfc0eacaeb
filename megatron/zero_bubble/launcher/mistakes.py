"""What ends a launch: the user's mistakes, each told in one line.

LauncherError     a flag, the script or its megatron-core does not fit
  HookError       a function that is to be hooked is missing or has another signature
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LauncherError(ValueError):
    """The launch cannot work; the message says what would."""


class HookError(LauncherError):
    """A function that is to be hooked is not as it should be."""


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Make every `ValueError` of our own checks a `LauncherError`: in the script's own code it may mean anything."""
    try:
        yield
    except LauncherError:
        raise
    except ValueError as error:
        raise LauncherError(str(error)) from error
