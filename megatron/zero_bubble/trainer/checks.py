"""Completes the flags with defaults and refuses invalid flags, before any process group exists.

From the same command line, every rank gets the same complete flags or the same error. Each error message is one line
that names the flag, its value and a remedy.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.zero_bubble.mcore.cpu import refuse_on_cpu
from megatron.zero_bubble.session.environment import (
    check_batch_size,
    check_device_found,
    check_devices,
    check_num_ranks,
)
from megatron.zero_bubble.session.flags import flag_name, flags_text
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import check_chunk_flags, chunks_of_flags
from megatron.zero_bubble.session.model_states import ReplicaCounts
from megatron.zero_bubble.session.output_places import check_places, check_zero_bubble_outputs
from megatron.zero_bubble.session.settings import JobSettings, check_implementation, job_settings
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.defaults import check_learning_rate, completed, require_multiple
from megatron.zero_bubble.trainer.hybrid_stages import check_pattern
from megatron.zero_bubble.trainer.model_checks import (
    check_experts,
    check_fp8,
    check_fully_sharded,
    check_model,
    check_recomputation,
)


def complete_and_check(
    parsed: Arguments, environment: Mapping[str, str], has_cuda: bool, *, for_this_machine: bool = True
) -> tuple[Arguments, JobSettings]:
    """Complete and check the trainer's flags, and make the `JobSettings` of the job.

    Args:
        for_this_machine: whether the job runs on this machine; if so, the packages, devices and folders of this machine
            are checked.

    Raises:
        ValueError: a flag is invalid; the message names the first invalid flag.
    """
    _check_ranges(parsed)
    if parsed.train_iters is None:
        raise ValueError("--train-iters is missing: give the number of iterations")
    args = completed(parsed, environment, has_cuda)
    check_model(args)
    check_pattern(args)
    check_fp8(args, has_cuda)
    _check_needs(args)
    flags = JobFlags.of(args)
    if for_this_machine:
        check_implementation(flags.transformer_impl)
        check_device_found(parsed, environment, Path("/dev"))
    check_num_ranks(args, args.world_size, "torchrun --nproc-per-node" if for_this_machine else "--world-size")
    _check_parallel(args, has_cuda)
    check_experts(args, has_cuda)
    _check_replicas(args)
    check_fully_sharded(args)
    _check_batches(args)
    _check_training(args)
    check_recomputation(args, for_this_machine=for_this_machine)
    check_chunk_flags(args)
    flags = replace(flags, train_iters=args.train_iters, model_chunks=chunks_of_flags(flags))
    job = job_settings(flags, environment, has_cuda, chooses_layout=True)
    args = replace(args, pipeline_model_parallel_layout=job.flags.pipeline_model_parallel_layout)
    _check_data(args)
    if for_this_machine:
        if has_cuda:
            check_devices(args, environment, torch.cuda.device_count())
        check_checkpoint_and_numerics(args)
        check_zero_bubble_outputs(args)
    return args, job


_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "must be at least 1",
        lambda value: value >= 1,
        "num_layers hidden_size num_attention_heads seq_length num_query_groups micro_batch_size "
        "max_position_embeddings ffn_hidden_size kv_channels make_vocab_size_divisible_by tensor_model_parallel_size "
        "pipeline_model_parallel_size train_iters global_batch_size seed log_interval eval_interval save_interval "
        "exit_interval log_memory_interval distributed_timeout_minutes vocab_size "
        "ddp_bucket_size lr_decay_iters fp8_amax_history_len num_experts "
        "expert_model_parallel_size context_parallel_size mtp_num_layers num_layers_per_virtual_pipeline_stage "
        "num_virtual_stages_per_pipeline_rank recompute_num_layers microbatch_group_size_per_virtual_pipeline_stage "
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers num_distributed_optimizer_instances "
        "expert_tensor_parallel_size moe_ffn_hidden_size moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank "
        "qk_head_dim qk_pos_emb_head_dim v_head_dim",
    ),
    (
        "must be at least 1",
        lambda value: not isinstance(value, int) or value >= 1,  # lists with one value for each layer are checked later
        "moe_layer_freq window_attn_skip_freq no_rope_freq",
    ),
    (
        "must be at least 0",
        lambda value: 0 <= value < math.inf,
        "lr min_lr weight_decay clip_grad eval_iters num_workers lr_warmup_iters init_method_std exit_duration_in_mins "
        "mtp_loss_scaling_factor decoupled_lr decoupled_min_lr",
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
    ("must be at most 1000000", lambda value: value <= 10**6, "distributed_timeout_minutes num_layers mtp_num_layers"),
)
"""Conditions on flag values, as (condition in words, condition as a function, names of flags with this condition)."""


def _check_ranges(args: Arguments) -> None:
    for expectation, holds, names in _RANGES:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not holds(value):
                raise ValueError(f"{flag_name(name)} {expectation}, got {value}")
    largest_seed = 2**32 - 1 - 100 * args.pipeline_model_parallel_size
    if args.seed > largest_seed:
        raise ValueError(f"--seed must be at most {largest_seed} on these ranks, got {args.seed}")


_NEEDS: Mapping[tuple[str, str, Any], str] = {
    ("reset_attention_mask", "transformer_impl", "local"): (
        "attention of {transformer_impl} ignores the mask, and is always causal"
    ),
    ("no_position_embedding", "position_embedding_type", "rope"): "a model without any positions is not supported",
    ("fp8_format", "transformer_impl", "transformer_engine"): "megatron-core's local layers have no fp8",
    ("fp8_param_gather", "use_distributed_optimizer", True): "",
    ("num_distributed_optimizer_instances", "use_distributed_optimizer", True): (
        "each instance shards the optimizer's state"
    ),
    ("use_precision_aware_optimizer", "use_distributed_optimizer", True): "",
    ("use_distributed_optimizer", "optimizer", "adam"): "megatron-core does not shard {optimizer}",
    ("grad_reduce_in_bf16", "bf16", True): "gradients of other models are reduced in the model's own precision",
    ("torch_fsdp2_no_reshard_after_forward", "use_torch_fsdp2", True): "",
    ("zero_bubble_reduce_every_microbatch", "use_torch_fsdp2", True): "",
}
"""(flag, other flag, value of the other flag that the first flag needs) -> reason, which may be empty."""


def _check_needs(args: Arguments) -> None:
    for (name, needed, value), reason in _NEEDS.items():
        given = getattr(args, name)
        if given != Arguments.__dataclass_fields__[name].default and getattr(args, needed) != value:
            because = f": {reason.format(**vars(args))}" if reason else ""
            raise ValueError(f"{flags_text({name: given})} needs {flags_text({needed: value})}{because}")


def _check_parallel(args: Arguments, has_cuda: bool) -> None:
    if not has_cuda:
        refuse_on_cpu(args)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context, length = args.context_parallel_size, args.seq_length
    parts = 2 * context * (tensor if args.sequence_parallel else 1)
    if context > 1 and length % parts:
        raise ValueError(
            f"--context-parallel-size {context} needs a --seq-length that is a multiple of {parts}, got {length}"
        )
    if args.num_layers < pipeline:
        raise ValueError(
            f"--pipeline-model-parallel-size {pipeline} has more stages than --num-layers {args.num_layers}"
        )
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        require_multiple(args, name, "tensor_model_parallel_size")
    if args.sequence_parallel and length % tensor:
        raise ValueError(
            f"--sequence-parallel splits --seq-length {length} over --tensor-model-parallel-size {tensor}: the size "
            "must divide the length"
        )
    if args.distributed_backend == "nccl" and not has_cuda:
        raise ValueError("--distributed-backend nccl needs CUDA, and torch finds none on this machine: use gloo")


def _check_replicas(args: Arguments) -> None:
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        raise ValueError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")
    instances, (replicas, sharing) = args.num_distributed_optimizer_instances, ReplicaCounts.of(args)
    given = f"--num-distributed-optimizer-instances {instances}"
    if sharing % instances or replicas % instances:
        of_experts = f" and the {sharing} ranks with the same experts" if sharing != replicas else ""
        raise ValueError(f"{given} must divide the {replicas} data- and context-parallel ranks{of_experts}")


def _check_batches(args: Arguments) -> None:
    sequences, replicas, whole = args.micro_batch_size, args.data_parallel_size, args.global_batch_size
    check_batch_size(whole, sequences, replicas)
    if args.rampup_batch_size is None:
        return
    start, increment, samples = args.rampup_batch_size
    ramp = f"--rampup-batch-size {start} {increment} {samples}"
    if min(start, increment, samples) < 1:
        raise ValueError(f"{ramp}: all three numbers must be at least 1")
    step = sequences * replicas
    if start % step or increment % step:
        raise ValueError(
            f"{ramp}: start and increment must be multiples of --micro-batch-size {sequences} x {replicas} "
            f"data-parallel replicas = {step}"
        )
    if whole <= start or (whole - start) % increment:
        raise ValueError(f"{ramp}: {start} plus a multiple of {increment} is not --global-batch-size {whole}")


def _check_training(args: Arguments) -> None:
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 and --fp16: give one of them")
    if args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32:
        raise ValueError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32: give one of them")
    if args.fp16 and args.loss_scale is None and args.min_loss_scale > args.initial_loss_scale:
        raise ValueError(
            f"--min-loss-scale {args.min_loss_scale} is above --initial-loss-scale {args.initial_loss_scale}"
        )
    check_learning_rate(args)


def _check_data(args: Arguments) -> None:
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if sum([args.mock_data, bool(args.data_path), any(per_split)]) != 1:
        raise ValueError(
            "give the data once: --data-path PREFIX, or --train-data-path PREFIX (and --valid-data-path), or "
            "--mock-data"
        )
    for name in ("reset_attention_mask", "reset_position_ids"):
        if args.variable_seq_lengths and getattr(args, name):
            raise ValueError(
                f"{flag_name(name)} does not work with --variable-seq-lengths: each sample is one document"
            )
    if args.tokenizer_type == "HuggingFaceTokenizer" and not args.tokenizer_model:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model")
    if args.no_create_attention_mask_in_dataloader and args.reset_attention_mask:
        raise ValueError(
            "--no-create-attention-mask-in-dataloader and --reset-attention-mask, which needs masks: give one of them"
        )
    if args.tokenizer_type is None:
        raise ValueError("--tokenizer-type is missing: HuggingFaceTokenizer, for example")
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size is None:
        raise ValueError("--tokenizer-type NullTokenizer (or --mock-data) needs --vocab-size")


def check_checkpoint_and_numerics(args: Arguments) -> None:
    """Check the flags of checkpoints and of --log-numerics, and check that the file and the folder can be written.

    Raises:
        ValueError: flags contradict each other, a package is missing, or the file or the folder cannot be written.
    """
    if args.load == "":
        raise ValueError("--load '' names no place: give a path, or leave the flag out")
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other"
        )
    if args.save is None and args.save_interval is not None:
        raise ValueError("--save-interval needs --save FOLDER")
    if args.save is not None and importlib.util.find_spec("psutil") is None:
        raise ValueError(
            f"--save {args.save}: megatron-core writes checkpoints only where the package psutil is installed"
        )
    check_places(args, ("save",), ("log_numerics",))
