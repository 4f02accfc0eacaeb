"""Reads users' files, and writes files atomically: a regular file appears complete or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.zero_bubble.schedule.errors import ScheduleError, one_line


def read_file(path: str | Path) -> str:
    """Return the text of a file, without the byte order mark that some editors write at the beginning of a file.

    Raises:
        OSError: `path` cannot be read.
        UnicodeDecodeError: the text is not UTF-8.
    """
    return Path(path).read_text(encoding="utf-8-sig")


@contextmanager
def reading(
    subject: str, errors: tuple[type[Exception], ...] = (OSError, UnicodeDecodeError, ScheduleError)
) -> Iterator[None]:
    """Turn an error of the `with` block, which reads a user's file, into a `ValueError` of one line.

    Args:
        subject: the beginning of the message: the flag and the file, such as `--profile costs.json`.
        errors: the errors to turn into a `ValueError`.

    Raises:
        ValueError: the block raised one of `errors`; the message begins with `subject`.
    """
    try:
        yield
    except errors as error:
        reason = one_line(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = f"cannot be read: {error.strerror}"
        raise ValueError(f"{subject}: {reason}") from error


def write_file(path: str | Path, text: str) -> None:
    """Write `text` to `path`. After an error or a crash, a regular file has either its old content or all of `text`.

    A regular file is replaced by a new file with the same permissions. A device, a FIFO or an open file of this process
    (such as `/dev/stdout`) is written in place. If `path` is a symbolic link, the target of the link is written.

    Raises:
        OSError: `path` cannot be written.
    """
    data = text.encode()
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:  # A broken link raises this error, too.
        _replace(Path(os.path.realpath(path)), data, None)
        return
    descriptor = _own_descriptor(str(path))
    if stat.S_ISREG(mode) and descriptor is None:
        _replace(Path(os.path.realpath(path)), data, mode)
        return
    # Opened without O_CREAT: the system may refuse that flag for another user's FIFO.
    opened = os.open(path, os.O_WRONLY) if descriptor is None else os.dup(descriptor)
    with open(opened, "wb") as stream:
        stream.write(data)


def why_unwritable(path: Path) -> str | None:
    """Return why `write_file` cannot write `path`; None if it probably can. Called before long work begins."""
    try:
        if path.is_dir():
            return f"{path} is a folder; name a file"
        if (path.exists() and not path.is_file()) or _own_descriptor(str(path)) is not None:
            return None  # written in place
        folder = Path(os.path.realpath(path)).parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            return f"{folder} is not a folder"
    except OSError as error:  # a folder that may not be searched, or a name that is too long
        return f"{path}: {error.strerror}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write to {folder}"


def _own_descriptor(path: str) -> int | None:
    """The file descriptor N if `path` is `/proc/self/fd/N` or a link to such a path; None for other paths.

    The caller writes to the descriptor, because reopening `/proc/self/fd/N` would overwrite a regular file from its
    start.
    """
    folder, name = os.path.split(path)
    if os.path.realpath(folder) == f"/proc/{os.getpid()}/fd":
        return int(name)
    return _own_descriptor(os.path.join(folder, os.readlink(path))) if os.path.islink(path) else None


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    temporary = target.with_name(f".{target.name[:32]}.{secrets.token_hex(4)}.tmp")
    with open(temporary, "xb") as file:
        try:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
