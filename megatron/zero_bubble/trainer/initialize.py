"""Sets up a rank for training: process groups, random seeds and megatron-core's microbatch calculator."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)

from megatron.zero_bubble.mcore.batch_sizes import has_steps, ramp_as_steps
from megatron.zero_bubble.mcore.placement import embedding_ranks
from megatron.zero_bubble.mcore.unit_run import clear_losses
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.session.environment import device_of_rank
from megatron.zero_bubble.trainer.arguments import Arguments


@contextmanager
def initialized(args: Arguments, placement: Placement) -> Iterator[None]:
    """Set up process groups, random seeds and megatron-core's microbatch calculator for the `with` block.

    If the caller has made a default process group, `initialized` uses that group and does not destroy it.

    Raises:
        ValueError: the ranks cannot connect, for example because the port is in use.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(device_of_rank(args.local_rank, torch.cuda.device_count()))
    owns_process_group = not dist.is_initialized()
    if owns_process_group:
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        try:
            dist.init_process_group(args.distributed_backend, timeout=timeout)
        except (dist.DistError, ValueError) as error:
            names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
            place = " ".join(f"{name}={os.environ.get(name)}" for name in names)
            raise ValueError(f"{place} (torchrun sets these): ranks cannot meet: {one_line(error)}") from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=placement.num_chunks if placement.num_chunks > 1 else None,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        get_embedding_ranks=embedding_ranks(placement),
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    seed_everything(args.seed)
    ramp = args.rampup_batch_size
    by_steps = {"step_batch_size_schedule": ramp_as_steps(ramp, args.global_batch_size)} if ramp and has_steps() else {}
    sizes = args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    init_num_microbatches_calculator(args.rank, None if by_steps else ramp, *sizes, **by_steps)
    yield
    # After an error, the rank skips the clean-up, whose collectives would wait for other ranks until torchrun ends
    # them.
    dist.barrier()
    unset_num_microbatches_calculator()
    # megatron-core stores auxiliary losses globally, with process groups and one value for each layer of this model.
    clear_losses()
    parallel_state.destroy_model_parallel()
    if owns_process_group:
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed all random generators as Megatron-LM does, with a different seed for each pipeline rank."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
