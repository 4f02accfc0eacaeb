"""Builds a training run's arguments and models from pretrain_gpt.py's flags, for measurements and estimates of a
job."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.job_flags import JobFlags

if TYPE_CHECKING:
    from megatron.zero_bubble.session.settings import JobSettings
    from megatron.zero_bubble.trainer.arguments import Arguments


def complete_training(
    flags: Sequence[str], world_size: int, prog: str, *, has_cuda: bool, for_this_machine: bool = True
) -> tuple[Arguments, JobSettings]:
    """Return the arguments and job settings with which a training run with `flags` on `world_size` ranks would start.

    The returned arguments include the padded size of the vocabulary.

    Args:
        has_cuda: whether the ranks will have CUDA devices.
        for_this_machine: whether to check this machine's packages, devices and permissions as well.

    Raises:
        ValueError: the training would refuse the flags; the message is the training's own error message.
    """
    # Imported here, because these modules import megatron-core, without which other parts of this module work.
    from megatron.zero_bubble.trainer.arguments import parse_arguments
    from megatron.zero_bubble.trainer.checks import complete_and_check
    from megatron.zero_bubble.trainer.defaults import with_vocabulary
    from megatron.zero_bubble.trainer.tokenizer import load_tokenizer

    parsed = parse_arguments(flags, prog, ignores_megatrons=not for_this_machine)
    environment = {"WORLD_SIZE": str(world_size)}
    args, job = complete_and_check(parsed, environment, has_cuda, for_this_machine=for_this_machine)
    return with_vocabulary(args, load_tokenizer(args).vocab_size), job


def complete_arguments(flags: Sequence[str], world_size: int, prog: str, *, has_cuda: bool) -> Arguments:
    """Return the arguments with which a training run with `flags` would start on this machine; see
    `complete_training`."""
    args, _ = complete_training(flags, world_size, prog, has_cuda=has_cuda)
    return args


def failure_reason(log: str) -> str | None:
    """Return the first error message in a training run's log or, without a message, the line of the first exception."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if ": error: " in line:
            return line.split(": error: ", 1)[1]
    return next((line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)), None)


@contextmanager
def one_process(args: Arguments) -> Iterator[None]:
    """Set up megatron-core's process groups and seeds for a single rank of a job without tensor or data parallelism.

    Args:
        args: the complete arguments of a job with any pipeline size.
    """
    # Everything is undone even after an error, because no other rank waits for this rank.
    with ExitStack() as changes:
        changes.callback(setattr, sys, "excepthook", sys.excepthook)  # `init_process_group` replaces it
        changes.callback(substitute_cuda().restore)
        # Imported after `substitute_cuda`, because the import of megatron-core looks for a device.
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

        from megatron.zero_bubble.mcore.unit_run import clear_losses
        from megatron.zero_bubble.trainer.initialize import initialized

        alone = replace(args, pipeline_model_parallel_size=1, world_size=1)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        backend = "nccl" if device is not None else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        changes.callback(dist.destroy_process_group)
        changes.callback(parallel_state.destroy_model_parallel)
        changes.callback(unset_num_microbatches_calculator)
        changes.callback(clear_losses)
        with initialized(alone, Placement("linear", 1)):
            yield


def rank_model(
    args: Arguments, placement: Placement, rank: int, store: WeightGradStore | None
) -> list[torch.nn.Module]:
    """Build the model chunks of one pipeline rank as training does; call this function within `one_process`.

    The pipeline size is the number of ranks of `placement`, not the size in `args`. Tied embeddings are not supported,
    because building them needs the other ranks. If `store` is None, the backward is not split into B and W.
    """
    from megatron.zero_bubble.session.session import Session
    from megatron.zero_bubble.trainer.model import build_model, transformer_config

    sized = replace(args, pipeline_model_parallel_size=placement.num_ranks)
    config = transformer_config(sized, placement.num_chunks, None)
    return build_model(sized, config, Session.to_build(JobFlags.of(sized), placement, store), rank)
