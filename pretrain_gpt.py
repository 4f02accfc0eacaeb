"""Pretrain a GPT: torchrun --nproc-per-node 4 pretrain_gpt.py <Megatron flags> --zero-bubble."""

from __future__ import annotations

import os
import sys

import torch

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.training.start_up import quiet_start_up, report


def main() -> int:
    """Parse, check, train; a user's mistake gives one line and exit status 2 on every rank."""
    quiet_start_up()
    substitute_cuda()
    # Only now: what follows imports megatron-core, which looks for a device and compiles as it is imported.
    from megatron.zero_bubble.training.arguments import parse_arguments
    from megatron.zero_bubble.training.checks import complete_and_check
    from megatron.zero_bubble.training.pretrain import pretrain

    try:
        args = parse_arguments(sys.argv[1:])
        complete_and_check(args, os.environ, torch.cuda.is_available())
        pretrain(args)
    except ValueError as error:
        return report("pretrain_gpt.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
