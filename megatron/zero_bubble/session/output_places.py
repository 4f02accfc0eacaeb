"""Checks at the start of a job that the files and folders for its output can be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.zero_bubble.session.flags import ZeroBubbleFlags, flag_name


def check_zero_bubble_outputs(flags: ZeroBubbleFlags) -> None:
    """Raise `ValueError` if a file or folder that the zero-bubble flags name cannot be written."""
    check_places(flags, ("zero_bubble_timeline",), ("zero_bubble_profile_output", "zero_bubble_unit_costs_output"))


def check_places(flags: object, folders: Sequence[str], files: Sequence[str]) -> None:
    """Check that the folders and files that flags name can be written.

    Args:
        flags: an object whose attributes are the values of the flags.
        folders, files: names of the flags that name folders and files; a flag that is not given is None.

    Raises:
        ValueError: a file or folder cannot be written; the message names the flag.
    """
    for name in (*folders, *files):
        value = getattr(flags, name)
        if value is None:
            continue
        if value == "":
            raise ValueError(f"{flag_name(name)} '' names no place: give a path, or leave the flag out")
        given, path = f"{flag_name(name)} {value}", Path(value).absolute()
        existing = next(place for place in (path, *path.parents) if os.path.exists(place))
        if name in folders and not existing.is_dir():
            raise ValueError(f"{given}: {existing} is not a folder")
        if name in files and not path.parent.is_dir():
            raise ValueError(f"{given}: its folder does not exist")
        if name in files and path.is_dir():
            raise ValueError(f"{given} is a folder; name a file")
        _check_writable(given, existing)
        if existing.is_file():  # a new file beside it replaces it
            _check_writable(given, Path(os.path.realpath(existing)).parent)


def _check_writable(flag: str, place: Path) -> None:
    """Raise `ValueError` unless `place` is writable; in a folder, make a temporary subfolder to detect a full disk."""
    permissions = os.W_OK | os.X_OK if place.is_dir() else os.W_OK
    if not os.access(place, permissions):
        raise ValueError(f"{flag}: this user may not write to {place}: choose another place")
    if not place.is_dir():
        return
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=place))
    except OSError as error:
        raise ValueError(f"{flag}: nothing can be made in {place} ({error.strerror}): choose another place") from error
