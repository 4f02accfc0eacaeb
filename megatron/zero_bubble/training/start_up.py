"""What a program does before anything else, and how it ends on a user's mistake. Imports nothing of megatron-core."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings

import torch

_SECONDS_FOR_RANK_0 = 15.0
"""In which rank 0 finds the mistake too, ends, and torchrun ends the others."""
_STATUS = 2


def quiet_start_up() -> None:
    """Drop what megatron-core warns of at import, once a rank: on a CPU there is nothing to do about it."""
    if os.environ.get("RANK", "0") == "0" and torch.cuda.is_available():
        return
    for message in (".*Apex (is|are) not installed", ".*full scope is deprecated", ".*lack of `?grouped_gemm"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


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
    print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    if rank == 0 and num_ranks > 1:
        # torchrun waits for the process to be gone. An interpreter full of modules takes seconds to end where ranks
        # share few cores; the others are killed, so nothing of the job is closed in order anyway.
        sys.stdout.flush()
        os._exit(_STATUS)
    return _STATUS
