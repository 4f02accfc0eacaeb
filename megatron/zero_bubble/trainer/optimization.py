"""Wraps model chunks for data parallelism, and builds megatron-core's optimizer and learning-rate scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron.zero_bubble.mcore.fully_sharded import FullyShardedChunk
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.core_errors import as_users_mistake
from megatron.zero_bubble.trainer.core_flags import config_values


def parameter_dtype(args: Arguments) -> torch.dtype:
    """Return the data type of the model's parameters and computation."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def reduces_in_fp32(args: Arguments) -> bool:
    """Whether gradients are accumulated and reduced in fp32."""
    return args.accumulate_allreduce_grads_in_fp32 or (args.bf16 and not args.grad_reduce_in_bf16)


def in_mixed_precision(
    args: Arguments, config: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Return the model chunks, wrapped to compute in the data type that the flags name."""
    return [Float16Module(config, chunk) if args.bf16 or args.fp16 else chunk for chunk in chunks]


def wrap_in_ddp(
    args: Arguments, config: TransformerConfig, chunks: Sequence[torch.nn.Module], *, defers_weights: bool
) -> list[Any]:
    """Wrap a rank's model chunks in megatron-core's DDP, or in FSDP2 with `--use-torch-fsdp2`.

    Args:
        defers_weights: whether the backward of the chunks' linear layers is split into B and W.

    Raises:
        ValueError: FSDP2 cannot shard a parameter, or DDP refuses a flag.
    """
    if args.use_torch_fsdp2:
        options: dict[str, Any] = {
            "keeps_parameters": args.torch_fsdp2_no_reshard_after_forward,
            "reduces_every_microbatch": args.zero_bubble_reduce_every_microbatch,
            "gradient_dtype": torch.float32 if reduces_in_fp32(args) else parameter_dtype(args),
        }
        try:
            return [FullyShardedChunk(config, chunk, **options) for chunk in chunks]
        except ValueError as error:
            raise ValueError(f"--use-torch-fsdp2: {error}") from error
    # As in Megatron-LM, the first chunk's gradients are divided into buckets; every other chunk has one bucket.
    ddp_config = _ddp_config(args, defers_weights)
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def _ddp_config(args: Arguments, splits_backward: bool) -> DistributedDataParallelConfig:
    values = config_values(args, DistributedDataParallelConfig)
    values.update(
        grad_reduce_in_fp32=reduces_in_fp32(args),
        # Gradients are checked before the reduction, because afterwards the replica with the NaN cannot be identified.
        check_for_nan_in_grad=args.checks_finite and args.data_parallel_size * args.context_parallel_size > 1,
        # With this setting, DDP gives each layer the hook that accumulates and reduces a gradient; W calls this hook.
        delay_wgrad_compute=splits_backward,
    )
    with as_users_mistake("these flags of data parallelism", AssertionError, ValueError):
        return DistributedDataParallelConfig(**values)


def build_optimizer(args: Arguments, model: list[torch.nn.Module], config: TransformerConfig) -> MegatronOptimizer:
    """Build megatron-core's optimizer for the model, in mixed precision with `--bf16` or `--fp16`.

    Raises:
        ValueError: megatron-core refuses a flag of the optimizer.
    """
    if args.use_precision_aware_optimizer and find_spec("transformer_engine") is None:
        raise ValueError("--use-precision-aware-optimizer needs the package transformer_engine: leave the flag out")
    values = config_values(args, OptimizerConfig)
    values.update(
        params_dtype=config.params_dtype, fp8_recipe=config.fp8_recipe if config.fp8 else None, timers=config.timers
    )
    with as_users_mistake("this optimizer", AssertionError, ValueError, ImportError, RuntimeError):
        optimizer_config = OptimizerConfig(**values)
    with as_users_mistake("this optimizer", AssertionError, ValueError, ImportError):
        optimizer = get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=dist.is_gloo_available())
    for group in optimizer.param_groups:
        # megatron-core reads this entry when it loads a checkpoint, but does not set the entry.
        group["is_decoupled_lr"] = not group["default_config"]
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_lr_scheduler(args: Arguments, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the scheduler of the learning rate's warm-up and decay; as in Megatron-LM, the scheduler counts samples."""
    batch, train_iters = args.global_batch_size, args.train_iters
    decay_steps = (args.lr_decay_iters or train_iters) * batch
    fraction = args.lr_warmup_fraction
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch if fraction is None else fraction * decay_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
    )
