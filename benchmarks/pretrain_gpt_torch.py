"""Trains like pretrain_gpt.py, but under a schedule of torch.distributed.pipelining, for comparisons.

    torchrun --nproc-per-node 4 -m benchmarks.pretrain_gpt_torch ZBVZeroBubble <pretrain_gpt.py's flags>

Only forward and backward are run by torch.distributed.pipelining; model, data, optimizer, loop and log line are
pretrain_gpt.py's. The linear layers of megatron-core compute with torch.nn.functional.linear, whose backward
torch.distributed.pipelining can split. The script supports only pipeline parallelism, does not evaluate or save, and
counts every token in the loss. Schedules with several chunks a rank need --num-virtual-stages-per-pipeline-rank.

A user's mistake ends the command with a one-line message and exit status 2.
"""

from __future__ import annotations

import sys
import warnings

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.session.start_up import run_program

PROG = "pretrain_gpt_torch.py"


def peer() -> None:
    """Train under the schedule in the first argument. Raises `ValueError` for a user's mistake."""
    warnings.filterwarnings("ignore", category=UserWarning)  # megatron-core warns of what a CPU lacks
    substitute_cuda()
    # Imported after the substitution, because megatron-core looks for a device as it is imported.
    from benchmarks.torch_training import train

    train(sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:], PROG)


def main() -> int:
    return run_program(PROG, peer)


if __name__ == "__main__":
    sys.exit(main())
