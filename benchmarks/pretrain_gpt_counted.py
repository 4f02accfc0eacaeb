"""Train like pretrain_gpt.py, count the memory of every pipeline rank, and print the peak of each rank.

    torchrun --nproc-per-node 4 -m benchmarks.pretrain_gpt_counted <pretrain_gpt.py's flags>

The states are all parameters, their gradients, and the optimizer's tensors, in bytes. After every operation, the count
of activations has three parts: tensors that autograd has saved for a backward, tensors that a later W needs, and
tensors of vocabulary shards. A storage that tensors of a microbatch share counts once. Messages in flight and the
temporary memory of an operation are not counted. The peak is the peak of the last iteration; if the training plans its
schedule, the last iteration runs the schedule planned from measured costs.

A user's mistake ends the command with a one-line message and exit status 2.
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
