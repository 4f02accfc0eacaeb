"""Trains like pretrain_gpt.py, but the last rank's data never comes from its ninth microbatch on."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from typing import Any

from megatron.zero_bubble.mcore.cpu import substitute_cuda

GOOD_BATCHES = 8


def hang() -> None:
    """Stands in for a file system that does not answer."""
    while True:
        time.sleep(60)


def main() -> None:
    substitute_cuda()
    from megatron.zero_bubble.session.session import Session
    from megatron.zero_bubble.trainer import forward_step
    from megatron.zero_bubble.trainer.arguments import parse_arguments
    from megatron.zero_bubble.trainer.checks import complete_and_check
    from megatron.zero_bubble.trainer.pretrain import pretrain

    get_batch, batches = forward_step.get_batch, count()

    def get_batch_or_hang(*args: Any, **options: Any) -> Any:
        if next(batches) == GOOD_BATCHES:
            hang()
        return get_batch(*args, **options)

    args, job = complete_and_check(parse_arguments(sys.argv[1:]), os.environ, has_cuda=False)
    if args.rank == args.world_size - 1:
        forward_step.get_batch = get_batch_or_hang
    pretrain(args, Session(job, "pretrain_gpt.py"))


if __name__ == "__main__":
    main()
