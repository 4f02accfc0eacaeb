"""Pretrains a GPT: torchrun --nproc-per-node 4 -m megatron.zero_bubble.trainer <Megatron flags> --zero-bubble.

In a clone of the repository, `pretrain_gpt.py` runs the same program as `-m megatron.zero_bubble.trainer`.
"""

from __future__ import annotations

import os
import sys

import torch

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.session.start_up import quiet_start_up, run_program

PROGRAM = "pretrain_gpt.py"


def train() -> None:
    """Parse the command line, check the flags and train.

    Raises:
        ValueError: the user has made a mistake, for example in a flag or in the data.
    """
    quiet_start_up()
    substitute_cuda()
    # Imported after `substitute_cuda`: these modules import megatron-core, which looks for a device and compiles.
    from megatron.zero_bubble.session.session import Session
    from megatron.zero_bubble.trainer.arguments import parse_arguments
    from megatron.zero_bubble.trainer.checks import complete_and_check
    from megatron.zero_bubble.trainer.pretrain import pretrain

    parsed = parse_arguments(sys.argv[1:])
    args, job = complete_and_check(parsed, os.environ, torch.cuda.is_available())
    pretrain(args, Session(job, PROGRAM))


def main() -> int:
    """Run the trainer; after a user's mistake, print a one-line error, and return exit status 2."""
    return run_program(PROGRAM, train)


if __name__ == "__main__":
    sys.exit(main())
