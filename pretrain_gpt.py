"""Pretrain a GPT: torchrun --nproc-per-node 4 pretrain_gpt.py <Megatron flags> --zero-bubble."""

from __future__ import annotations

import os
import sys
import time
import warnings

import torch

from megatron.zero_bubble.mcore.cpu import substitute_cuda


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
        return report(error)
    return 0


def quiet_start_up() -> None:
    """Drop what megatron-core warns of at import, once a rank: on a CPU there is nothing to do about it."""
    if os.environ.get("RANK", "0") == "0" and torch.cuda.is_available():
        return
    for message in (".*Apex (is|are) not installed", ".*full scope is deprecated", ".*lack of `?grouped_gemm"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def report(error: ValueError) -> int:
    """Print the user's mistake once, although every rank finds it.

    Rank 0 speaks at once, the others only if they are still there after a while: a mistake that is
    everyone's ends the job with rank 0, one that only some rank sees is still told.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0:
        time.sleep(5.0)
    print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
