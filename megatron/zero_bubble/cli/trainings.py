"""pretrain_gpt.py's flags, read without starting a training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.training.arguments import Arguments, parse_arguments


def complete_arguments(
    flags: Sequence[str], world_size: int, prog: str, *, has_cuda: bool, for_this_machine: bool = True
) -> Arguments:
    """What a training with these flags on `world_size` ranks would begin with, the padded vocabulary included.

    Args:
        has_cuda: whether its ranks will have CUDA devices.
        for_this_machine: whether it is to run here; otherwise what is installed and can be written here says nothing.

    Raises:
        ValueError: the training would refuse the flags; its own line.
    """
    args = parse_arguments(flags, prog)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # megatron-core's, about what a CPU has not
        substitution = substitute_cuda()
        # Only now: megatron-core looks for a device as it is imported.
        from megatron.zero_bubble.training.checks import complete_and_check
        from megatron.zero_bubble.training.pretrain import load_tokenizer

        try:
            complete_and_check(args, {"WORLD_SIZE": str(world_size)}, has_cuda, for_this_machine=for_this_machine)
            load_tokenizer(args)
        finally:
            substitution.restore()
    return args
