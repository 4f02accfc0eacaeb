"""Starts and ends a program as a rank of a job. Imports nothing of megatron-core."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from megatron.zero_bubble.runtime.processes import end_children, end_with_parent, tie_children
from megatron.zero_bubble.session.reports import print_error

_SECONDS_FOR_RANK_0 = 5.0
"""Seconds the other ranks wait for rank 0 to report the same mistake, so that it is printed once."""
_SECONDS_TO_END = 8
"""Seconds the interpreter has to exit after an error before the kernel ends it."""
_STATUS = 2


class SessionError(ValueError):
    """The run cannot begin or go on; the message is one line that tells the user why."""


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Turn a `ValueError` of a check into a `SessionError`, to tell it from one that a script's own code raises."""
    try:
        yield
    except SessionError:
        raise
    except ValueError as error:
        raise SessionError(str(error)) from error


def quiet_start_up() -> None:
    """Drop warnings that megatron-core prints on each rank at import: rank 0 on a GPU is enough to show them."""
    if os.environ.get("RANK", "0") == "0" and torch.cuda.is_available():
        return
    for message in (".*Apex (is|are) not installed", ".*full scope is deprecated", ".*lack of `?grouped_gemm"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def run_program(program: str, body: Callable[[], None], mistakes: type[ValueError] = ValueError) -> int:
    """Run `body` as the whole program of one rank, and leave no child process behind however it ends.

    A user's mistake is printed as one line. Any other error also reaches torchrun, which repeats it in its summary.
    Ctrl-C ends the process at once and silently, like SIGTERM, unless `body` handles these signals.

    Args:
        program: name of the program as the user calls it, with which the line begins.
        mistakes: the type of exception that a user's mistake raises.

    Returns:
        The program's exit status.
    """
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    tie_children()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)
    try:
        body()
    except mistakes as error:
        return report(program, error)
    except Exception:
        _tell_torchrun(traceback.format_exc())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SECONDS_TO_END)
        raise
    finally:
        end_children()
        signal.signal(signal.SIGINT, on_interrupt)
    return 0


def report(program: str, error: ValueError) -> int:
    """Print the user's mistake once, although every rank finds it, and return the program's exit status.

    Rank 0 prints at once. The other ranks print only if they still run some seconds later: a mistake that all ranks
    find ends the job with rank 0, and one that only another rank finds is still printed.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank > 0:
        # torchrun ends the other ranks by SIGTERM, which a trainer may have turned into a request to save.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_SECONDS_FOR_RANK_0)
    _tell_torchrun(f"{program}: error: {error}")
    print_error(program, error)
    if num_ranks > 1:
        _leave()
    return _STATUS


def _tell_torchrun(reason: str) -> None:
    """Write the reason to torchrun's error file, in the form of its `ErrorHandler`, so that its summary shows it.

    torchrun takes the earliest failure for the cause, in whole seconds, and counts ranks that it ends itself. Hence
    the time is set one second back.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        details = {"py_callstack": reason, "timestamp": str(int(time.time()) - 1)}
        with open(file, "w") as stream:
            json.dump({"message": {"message": reason, "extraInfo": details}}, stream)


def _leave() -> NoReturn:
    """End this process at once: torchrun waits for it before it ends the other ranks.

    A normal exit of the interpreter takes seconds when ranks share few cores.
    """
    sys.stdout.flush()
    end_children()
    os._exit(_STATUS)
