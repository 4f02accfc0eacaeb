"""Checks that the value of each of the trainer's flags is in its range."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.trainer.arguments import Arguments

_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "must be at least 1",
        lambda value: value >= 1,
        "num_layers hidden_size num_attention_heads seq_length num_query_groups micro_batch_size "
        "max_position_embeddings ffn_hidden_size kv_channels make_vocab_size_divisible_by tensor_model_parallel_size "
        "pipeline_model_parallel_size train_iters global_batch_size seed log_interval eval_interval save_interval "
        "exit_interval tensorboard_log_interval log_memory_interval distributed_timeout_minutes vocab_size "
        "ddp_bucket_size lr_decay_iters lr_decay_samples train_samples fp8_amax_history_len num_experts "
        "expert_model_parallel_size context_parallel_size mtp_num_layers num_layers_per_virtual_pipeline_stage "
        "num_virtual_stages_per_pipeline_rank recompute_num_layers microbatch_group_size_per_virtual_pipeline_stage "
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers num_distributed_optimizer_instances "
        "expert_tensor_parallel_size moe_ffn_hidden_size moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank "
        "qk_head_dim qk_pos_emb_head_dim v_head_dim",
    ),
    (
        "must be at least 0",
        lambda value: 0 <= value < math.inf,
        "lr min_lr weight_decay clip_grad eval_iters num_workers lr_warmup_iters init_method_std exit_duration_in_mins "
        "mtp_loss_scaling_factor lr_warmup_samples decoupled_lr decoupled_min_lr profile_step_start",
    ),
    (
        "must be above 0",
        lambda value: 0 < value < math.inf,
        "norm_epsilon adam_eps rotary_base loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    ),
    (
        "must be in [0, 1)",
        lambda value: 0 <= value < 1,
        "attention_dropout hidden_dropout adam_beta1 adam_beta2 sgd_momentum",
    ),
    ("must be in (0, 1]", lambda value: 0 < value <= 1, "rotary_percent"),
    ("must be 0, 1 or 2", lambda value: value in (0, 1, 2), "timing_log_level empty_unused_memory_level"),
    ("must be at most 1000000", lambda value: value <= 10**6, "distributed_timeout_minutes"),
)
"""Conditions on values, in words and as functions, and the names of the flags that they hold for."""


def check_ranges(args: Arguments) -> None:
    """Check the value of every flag by itself.

    Raises:
        ValueError: the first value that is out of range.
    """
    for expectation, holds, names in _RANGES:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not holds(value):
                raise ValueError(f"{flag_name(name)} {expectation}, got {value}")
    largest_seed = 2**32 - 1 - 100 * args.pipeline_model_parallel_size
    if args.seed > largest_seed:
        raise ValueError(f"--seed must be at most {largest_seed} on these ranks, got {args.seed}")
