"""How a program of ours begins and ends as a rank of a job. Imports nothing of megatron-core."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.processes import end_children, end_with_parent, tie_children

_SECONDS_FOR_RANK_0 = 5.0
"""Seconds the other ranks wait for rank 0 to report the same mistake, so that it is printed once."""
_SECONDS_TO_END = 8
"""Seconds an interpreter has to end after an error, before the kernel ends it."""
_STATUS = 2


def quiet_start_up() -> None:
    """Drop what megatron-core warns of at import, once a rank: on a CPU there is nothing to do about it."""
    if os.environ.get("RANK", "0") == "0" and torch.cuda.is_available():
        return
    for message in (".*Apex (is|are) not installed", ".*full scope is deprecated", ".*lack of `?grouped_gemm"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def run_program(program: str, body: Callable[[], None], mistakes: type[ValueError] = ValueError) -> int:
    """Run `body` as the whole program of one rank, and leave no process behind, whatever way it ends.

    A user's mistake is printed as one line. Any other error also reaches torchrun, which repeats it in its summary.
    Ctrl-C ends the process at once and without a word, like SIGTERM, unless `body` handles these signals.

    Args:
        program: as the user calls it; begins the line.
        mistakes: the errors that are the user's.

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
    """Print the user's mistake once, although every rank finds it. Gives the program's exit status.

    Rank 0 speaks at once, the others only if they are still there after a while: a mistake that is
    everyone's ends the job with rank 0, one that only some rank sees is still told.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if rank > 0:
        # torchrun ends the others by this signal, which a trainer may have made a request to save.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_SECONDS_FOR_RANK_0)
    line = f"{program}: error: {error}"
    _tell_torchrun(line)
    print(line, file=sys.stderr, flush=True)
    if num_ranks > 1:
        _leave()
    return _STATUS


def _tell_torchrun(reason: str) -> None:
    """Write the reason where torchrun looks for it, in the form of its `ErrorHandler`, so that its summary shows it.

    torchrun takes the earliest failure for the cause, in whole seconds, and counts ranks that it ends itself. Hence a
    second less.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        details = {"py_callstack": reason, "timestamp": str(int(time.time()) - 1)}
        with open(file, "w") as stream:
            json.dump({"message": {"message": reason, "extraInfo": details}}, stream)


def _leave() -> NoReturn:
    """End this rank of several now: torchrun waits for it before it ends the others.

    An interpreter full of modules takes seconds to end where ranks share few cores.
    """
    sys.stdout.flush()
    end_children()
    os._exit(_STATUS)


def print_rank_0(message: str) -> None:
    """Print once in the whole job."""
    if dist.get_rank() == 0:
        print(message, flush=True)
