"""Runs a program as one rank of a job, and ends the rank after errors. The module does not import megatron-core."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import torch

from megatron.zero_bubble.runtime.copy_lane import HostMemoryError
from megatron.zero_bubble.runtime.processes import end_children, end_with_parent, tie_children
from megatron.zero_bubble.session.reports import flush_output, print_error

_SECONDS_FOR_RANK_0 = 5.0
"""Seconds for which a rank above 0, or a rank that lost a connection, delays its error message; see `report`."""
_SECONDS_TO_END = 8
"""Seconds after an error until the kernel ends the process, if the interpreter has not exited by itself."""
_STATUS = 2
_STATUS_OF_LOST_RANK = 1
"""Exit status of a rank that has lost the connection to another rank."""
_LOST_WORKER = re.compile(r"DataLoader worker \(pid.*?\d\) (is killed|exited)[^.]*")
_LOST_RANK = re.compile(r"Connection (closed|reset) by peer|remote worker crashing|Connection was likely closed")


class SessionError(ValueError):
    """Raised if the run cannot begin or continue; the message is one line with the reason."""


class _LostRankError(SessionError):
    """Raised if another rank of the job has ended."""


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Turn a check's `ValueError` into a `SessionError`, to distinguish it from a `ValueError` in user code."""
    try:
        yield
    except SessionError:
        raise
    except ValueError as error:
        raise SessionError(str(error)) from error


@contextmanager
def writing(flag: str, path: str | Path) -> Iterator[None]:
    """Turn an `OSError` of the `with` block into a `SessionError` that names the flag and the file."""
    try:
        yield
    except OSError as error:
        raise SessionError(f"{flag} {path}: cannot be written: {error.strerror}") from error


def quiet_start_up() -> None:
    """Show megatron-core's warnings only once if every rank, or every split of a dataset, would repeat the warnings.

    megatron-core's warnings about missing packages and deprecated settings appear only on rank 0, and only with a GPU.
    Every rank shows each message of megatron-core's GPT datasets, such as the warning about a missing cache, only once.
    """
    told: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        is_repeated = record.getMessage() in told
        told.add(record.getMessage())
        return not is_repeated

    logging.getLogger("megatron.core.datasets.gpt_dataset").addFilter(is_new)
    if os.environ.get("RANK", "0") == "0" and torch.cuda.is_available():
        return
    for message in (".*Apex (is|are) not installed", ".*full scope is deprecated", ".*lack of `?grouped_gemm"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def run_program(program: str, body: Callable[[], None], mistakes: type[ValueError] = ValueError) -> int:
    """Run `body` as the whole program of one rank; end all child processes afterwards, also after an error.

    `run_program` prints an error as one line in three cases: a user's mistake, a lack of host memory for activations,
    and the end of a data-loading process or of another rank. `run_program` raises any other error, and torchrun repeats
    the error in its summary. Ctrl-C and SIGTERM end the process at once and silently, unless `body` handles them.

    Args:
        program: name of the program as the user calls it; the printed line begins with this name.
        mistakes: the type of exception that a user's mistake raises.

    Returns:
        The program's exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            # A path that the locale cannot encode must not end the job when a line names the path.
            stream.reconfigure(errors="backslashreplace")
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    tie_children()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)
    try:
        body()
    except (mistakes, HostMemoryError) as error:
        return report(program, error)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if (loss := _lost_process(error)) is not None:
            return report(program, loss)
        _tell_torchrun(traceback.format_exc())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SECONDS_TO_END)
        raise
    finally:
        end_children()
        signal.signal(signal.SIGINT, on_interrupt)
    return 0


def report(program: str, error: Exception) -> int:
    """Print the reason why the program ends, and return the exit status.

    If all ranks have the same reason, usually only rank 0 prints the reason. Ranks above 0, and ranks that have lost
    their connection to another rank, sleep for some seconds before they print their errors. Before a sleeping rank
    prints, torchrun usually notices that another rank has failed, and ends the sleeping rank.
    """
    # The variables may have caused the error, so they need not contain numbers.
    if os.environ.get("RANK", "0") != "0" or isinstance(error, _LostRankError):
        # torchrun ends the other ranks by SIGTERM, which a trainer may have turned into a request to save.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_SECONDS_FOR_RANK_0)
    print_error(program, error)
    _tell_torchrun(f"{program}: error: {error}")
    status = _STATUS_OF_LOST_RANK if isinstance(error, _LostRankError) else _STATUS
    if os.environ.get("WORLD_SIZE", "1") != "1":
        _leave(status)
    return status


def _lost_process(error: BaseException) -> SessionError | None:
    """A one-line error if `error` was raised because another process has ended; None for any other cause."""
    if isinstance(error.__cause__, Exception) and (loss := _lost_process(error.__cause__)) is not None:
        return loss
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if (worker := _LOST_WORKER.match(text)) is not None:
        return SessionError(f"{worker[0]}; if the system's log says that memory ran out, give fewer --num-workers")
    if _LOST_RANK.search(text) is not None:
        rank = os.environ.get("RANK", "0")
        return _LostRankError(
            f"rank {rank} has lost another rank, whose error message, if any, gives the reason: {text.splitlines()[0]}"
        )
    return None


def _tell_torchrun(reason: str) -> None:
    """Write the reason of an error to torchrun's error file, so that the summary of torchrun shows the reason.

    torchrun reports the failure with the earliest time, in whole seconds, as the cause; other ranks may fail in the
    same second. The error file contains a time one second before the error, so that torchrun reports this error
    as the cause. If the file cannot be written, only the summary lacks the reason.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": reason, "timestamp": str(int(time.time()) - 1)}
        with suppress(OSError), open(file, "w") as stream:
            json.dump({"message": {"message": reason, "extraInfo": details}}, stream)


def _leave(status: int) -> NoReturn:
    """End this process at once, because torchrun would wait for a normal exit, which takes seconds on few cores."""
    flush_output()
    end_children()
    os._exit(status)
