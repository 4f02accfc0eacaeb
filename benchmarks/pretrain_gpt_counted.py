"""Train like pretrain_gpt.py, count the memory of every pipeline rank, and print its peak at the end.

    torchrun --nproc-per-node 4 -m benchmarks.pretrain_gpt_counted <pretrain_gpt.py's flags>

The states are the bytes of all parameters, of their gradients and of the optimizer's tensors. To them come, after every
operation, the bytes that autograd has saved for a backward, that a W holds, and that vocabulary shards keep; each
storage of a microbatch counts once. Messages under way are not counted, nor what an operation needs while it runs. The
peak is that of the last iteration, whose schedule is planned from measured costs if the training plans at all.

A mistake ends with one line and exit status 2.
"""

from __future__ import annotations

import sys
import warnings

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.session.start_up import run_program

PROG = "pretrain_gpt_counted.py"


def count() -> None:
    """Train with the flags of the command line. Raises `ValueError` for a user's mistake."""
    warnings.filterwarnings("ignore", category=UserWarning)  # megatron-core warns of what a CPU lacks
    substitute_cuda()
    # Imported after the substitution, because megatron-core looks for a device as it is imported.
    from benchmarks.counted_training import train

    train(sys.argv[1:], PROG)


def main() -> int:
    return run_program(PROG, count)


if __name__ == "__main__":
    sys.exit(main())
