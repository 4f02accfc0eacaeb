"""What a program does before anything else, and how it ends on a user's mistake. Imports nothing of megatron-core."""

from __future__ import annotations

import os
import sys
import time
import warnings

import torch


def quiet_start_up() -> None:
    """Drop what megatron-core warns of at import, once a rank: on a CPU there is nothing to do about it."""
    if os.environ.get("RANK", "0") == "0" and torch.cuda.is_available():
        return
    for message in (".*Apex (is|are) not installed", ".*full scope is deprecated", ".*lack of `?grouped_gemm"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def report(program: str, error: ValueError) -> int:
    """Print the user's mistake once, although every rank finds it.

    Rank 0 speaks at once, the others only if they are still there after a while: a mistake that is
    everyone's ends the job with rank 0, one that only some rank sees is still told.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        time.sleep(5.0)
    print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    return 2
