"""Checks that the files and folders for output can be written."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.trainer.arguments import Arguments

_FOLDERS = ("save", "zero_bubble_timeline")
_FILES = ("log_numerics", "zero_bubble_profile_output", "zero_bubble_unit_costs_output")


def check_output(args: Arguments) -> None:
    """Check the flags that name files and folders, and check that the output files and folders can be written.

    Raises:
        ValueError: flags contradict each other, a package is missing, or a file or folder cannot be written.
    """
    for name in ("load", *_FOLDERS, *_FILES):
        if getattr(args, name) == "":
            raise ValueError(f"{flag_name(name)} '' names no place: give a path, or leave the flag out")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other"
        )
    if args.save is None and args.save_interval is not None:
        raise ValueError("--save-interval needs --save FOLDER")
    if args.save is not None and importlib.util.find_spec("psutil") is None:
        raise ValueError(
            f"--save {args.save}: megatron-core writes checkpoints only where the package psutil is installed"
        )
    for name in (*_FOLDERS, *_FILES):
        value = getattr(args, name)
        if value is None:
            continue
        given, path = f"{flag_name(name)} {value}", Path(value).absolute()
        existing = next(place for place in (path, *path.parents) if os.path.exists(place))
        if name in _FOLDERS and not existing.is_dir():
            raise ValueError(f"{given}: {existing} is not a folder")
        if name in _FILES and not path.parent.is_dir():
            raise ValueError(f"{given}: its folder does not exist")
        if name in _FILES and path.is_dir():
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
