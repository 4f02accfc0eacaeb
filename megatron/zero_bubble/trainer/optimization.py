"""Builds megatron-core's optimizer and learning-rate scheduler from the flags."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.core_flags import config_values
from megatron.zero_bubble.trainer.run_length import learning_rate_steps


def build_optimizer(args: Arguments, model: list[torch.nn.Module], config: TransformerConfig) -> MegatronOptimizer:
    """megatron-core's optimizer for the model; mixed precision with `--bf16` or `--fp16`."""
    values = config_values(args, OptimizerConfig)
    values.update(
        params_dtype=config.params_dtype, fp8_recipe=config.fp8_recipe if config.fp8 else None, timers=config.timers
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**values), model, use_gloo_process_groups=dist.is_gloo_available()
    )
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_lr_scheduler(args: Arguments, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The scheduler of the learning rate's warm-up and decay, which counts samples as in Megatron-LM."""
    steps = learning_rate_steps(args)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=steps.warmup,
        lr_decay_steps=steps.decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=steps.weight_decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
    )
