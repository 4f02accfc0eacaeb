"""`pretrain_gpt.py` in which a rank fails: its first flag is `fault:KIND@RANK@COUNT`, at the COUNT-th microbatch.

Kinds: `error`, an exception in the forward step; `full disk`, after which no file of the rank takes another byte.
"""

from __future__ import annotations

import resource
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

FAULT = "fault:"


def error() -> None:
    raise RuntimeError("a planted error")


def full_disk() -> None:
    """Let writes fail as on a full disk, with an error and not with a signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


KINDS = {"error": error, "full disk": full_disk}


def plant(kind: str, rank: int, number: int) -> None:
    """Let the forward step of this rank, if it is the one, fail at this microbatch."""
    import torch.distributed as dist

    from megatron.zero_bubble.training import forward_step

    get_batch, batches = forward_step.get_batch, count(1)

    def get_batch_or_fail(*args: Any, **options: Any) -> Any:
        if next(batches) == number and dist.get_rank() == rank:
            KINDS[kind]()
        return get_batch(*args, **options)

    forward_step.get_batch = get_batch_or_fail


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from megatron.zero_bubble.training import __main__ as program

    program.substitute_cuda()
    program.substitute_cuda = lambda: None  # once is enough, and comes before megatron-core is imported
    kind, rank, number = sys.argv.pop(1).removeprefix(FAULT).split("@")
    plant(kind, int(rank), int(number))
    sys.exit(program.main())
