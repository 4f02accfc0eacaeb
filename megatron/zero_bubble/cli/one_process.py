"""A job of one process in which any stage of a pipeline can be built: counted, measured, or run beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
import torch.distributed as dist

from megatron.zero_bubble.mcore.cpu import substitute_cuda
from megatron.zero_bubble.runtime.weight_grad_store import WeightGradStore
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments


@contextmanager
def one_process(args: Arguments) -> Iterator[None]:
    """megatron-core's process groups and seeds for a single rank, without tensor or data parallelism.

    Args:
        args: complete, of a job with any pipeline size.
    """
    substitution = substitute_cuda()
    # Only now: megatron-core looks at the device while it is imported.
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    from megatron.zero_bubble.training.initialize import initialized

    alone = copy(args)
    alone.pipeline_model_parallel_size = alone.world_size = 1
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with initialized(alone, Placement("linear", 1)):
            yield
    finally:
        # After an error, too: nobody else waits for this rank.
        unset_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        substitution.restore()


def rank_model(
    args: Arguments, placement: Placement, rank: int, store: WeightGradStore | None
) -> list[torch.nn.Module]:
    """The model chunks of one pipeline rank of `placement`, as training builds them; within `one_process`.

    The pipeline size is the placement's, whatever the flags say. Tied embeddings would need the other ranks.
    """
    from megatron.zero_bubble.training.model import build_model, transformer_config

    sized = copy(args)
    sized.pipeline_model_parallel_size = placement.num_ranks
    config = transformer_config(sized, placement.num_chunks, None)
    return build_model(sized, config, placement, store, rank)
