"""`pretrain_gpt.py` in which a rank fails. The faults are functions of this file; `command` names one in a command.

failing_training.py FAULT RANK MICROBATCH FLAGS...
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def raise_error() -> None:
    raise RuntimeError("a planted error")


def fill_disk() -> None:
    """Let writes fail as on a full disk, with an error and not with a signal, but let the log grow, which is short."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def fill_host_memory() -> None:
    from megatron.zero_bubble.runtime.copy_lane import ThreadLink

    def no_tensor(link: ThreadLink, num_bytes: int) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    ThreadLink.host_tensor = no_tensor


def die_in_a_copy() -> None:
    from megatron.zero_bubble.runtime.copy_lane import ThreadLink

    ThreadLink._copy = lambda link, pairs: signal.raise_signal(signal.SIGKILL)


def write_for_ever() -> None:
    """Let no file of a checkpoint come to its end."""
    os.fsync = lambda descriptor: time.sleep(1e6)


def command(fault: Callable[[], None], rank: int, microbatch: int) -> tuple[str, ...]:
    """The words before the flags of a training in which `fault` strikes a rank as it reads this microbatch, from 1."""
    return (__file__, fault.__name__, str(rank), str(microbatch))


def plant(fault: Callable[[], None], rank: int, microbatch: int) -> None:
    import torch.distributed as dist

    from megatron.zero_bubble.trainer import forward_step

    get_batch, batches = forward_step.get_batch, count(1)

    def get_batch_or_fail(*args: Any, **options: Any) -> Any:
        if next(batches) == microbatch and dist.get_rank() == rank:
            fault()
        return get_batch(*args, **options)

    forward_step.get_batch = get_batch_or_fail


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from megatron.zero_bubble.trainer import __main__ as program

    program.substitute_cuda()
    program.substitute_cuda = lambda: None  # once is enough, and comes before megatron-core is imported
    name, rank, microbatch = (sys.argv.pop(1) for _ in range(3))
    plant(globals()[name], int(rank), int(microbatch))
    sys.exit(program.main())
