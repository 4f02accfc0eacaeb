"""The exception for the user's mistakes, which end a launch with one line of explanation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.zero_bubble.session.start_up import SessionError


class LauncherError(SessionError):
    """A flag, the script or its megatron-core does not fit; the message says what to change."""


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Turn a `ValueError` of a check into a `LauncherError`, to tell it from one that the script's code raises."""
    try:
        yield
    except SessionError:
        raise
    except ValueError as error:
        raise LauncherError(str(error)) from error
