"""Completes the flags with defaults and refuses flags that cannot work, before any process group exists.

Every rank gets the same result from the same command line. Each message is one line that names the flag, its value
and what would work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron.zero_bubble.session.environment import (
    check_device_found,
    check_devices,
    check_num_ranks,
)
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.layers import chunks_of_flags
from megatron.zero_bubble.session.settings import JobSettings, check_implementation, job_settings
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.defaults import (
    check_learning_rate,
    check_length,
    completed,
    require_multiple,
    with_iterations,
)
from megatron.zero_bubble.trainer.flag_ranges import check_ranges
from megatron.zero_bubble.trainer.hybrid_stages import check_pattern
from megatron.zero_bubble.trainer.iteration_profile import check_profile
from megatron.zero_bubble.trainer.output_folders import check_output
from megatron.zero_bubble.trainer.sharding_checks import check_fully_sharded
from megatron.zero_bubble.trainer.size_checks import check_memory


def complete_and_check(
    parsed: Arguments, environment: Mapping[str, str], has_cuda: bool, *, for_this_machine: bool = True
) -> tuple[Arguments, JobSettings]:
    """Complete the flags with defaults that depend on other flags or on the machine, and make the job's settings.

    Args:
        for_this_machine: whether the job runs on this machine; otherwise its packages, devices, memory and folders
            are not checked.

    Raises:
        ValueError: the first flag that cannot work.
    """
    check_ranges(parsed)
    check_length(parsed)
    args = completed(parsed, environment, has_cuda)
    _check_model(args)
    check_pattern(args)
    _check_kernels(args, has_cuda)
    flags = JobFlags.of(args)
    if for_this_machine:
        check_implementation(flags)
        check_device_found(parsed, environment, Path("/dev"))
    source = "torchrun --nproc-per-node" if for_this_machine else "--world-size"
    check_num_ranks(args, args.world_size, source)
    _check_parallel(args, has_cuda)
    _check_experts(args, has_cuda)
    _check_replicas(args)
    check_fully_sharded(args)
    _check_batches(args)
    args = with_iterations(args)
    _check_training(args)
    if for_this_machine:
        check_memory(args)
    flags = replace(flags, train_iters=args.train_iters, model_chunks=chunks_of_flags(flags))
    job = job_settings(flags, environment, has_cuda, chooses_layout=True)
    args = replace(args, pipeline_model_parallel_layout=job.flags.pipeline_model_parallel_layout)
    _check_data(args)
    if for_this_machine:
        if has_cuda:
            check_devices(args, environment, torch.cuda.device_count())
        check_output(args)
    return args, job


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_model(args: Arguments) -> None:
    assert args.max_position_embeddings is not None
    assert args.kv_channels is not None
    require_multiple(args, "num_attention_heads", "num_query_groups")
    _require(
        args.max_position_embeddings >= args.seq_length,
        f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length {args.seq_length}",
    )
    rotated = int(args.kv_channels * args.rotary_percent)
    _require(
        args.position_embedding_type != "rope" or rotated + rotated % 2 <= args.kv_channels,
        f"--position-embedding-type rope rotates pairs of channels, but a head has {args.kv_channels}: "
        f"choose another --kv-channels, or a --rotary-percent below {args.rotary_percent}",
    )
    _require(
        not (args.save and args.mtp_num_layers and args.pipeline_model_parallel_size > 1)
        or args.position_embedding_type == "rope",
        f"--save {args.save} with --mtp-num-layers {args.mtp_num_layers} needs --position-embedding-type rope: the "
        "first and the last stage learn positions of their own, of which a checkpoint holds one",
    )
    _require(
        not args.reset_attention_mask or args.transformer_impl == "local",
        f"--reset-attention-mask needs --transformer-impl local: attention of {args.transformer_impl} is causal, "
        "whatever mask it is given",
    )
    _require(
        args.attention_backend != "local" or args.transformer_impl == "local",
        f"--attention-backend local needs --transformer-impl local: use unfused with {args.transformer_impl}",
    )


def _check_kernels(args: Arguments, has_cuda: bool) -> None:
    """Refuse flags that choose kernels or formats of numbers which the layers or the machine do not have."""
    _require(
        not args.no_position_embedding or args.position_embedding_type == "rope",
        "--no-position-embedding needs --position-embedding-type rope: a model without any positions is not supported",
    )
    if args.fp8_format is None:
        for name in ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_param_gather"):
            is_default = getattr(args, name) == Arguments.__dataclass_fields__[name].default
            _require(is_default, f"{flag_name(name)} needs --fp8-format")
        return
    fp8 = f"--fp8-format {args.fp8_format}"
    _require(has_cuda, f"{fp8} needs a GPU with fp8 arithmetic, and torch finds none on this machine: use --bf16")
    _require(
        args.transformer_impl == "transformer_engine",
        f"{fp8} needs --transformer-impl transformer_engine: megatron-core's local layers have no fp8",
    )
    _require(
        not args.fp8_param_gather or args.use_distributed_optimizer,
        "--fp8-param-gather needs --use-distributed-optimizer",
    )


def _check_parallel(args: Arguments, has_cuda: bool) -> None:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    context = args.context_parallel_size
    parts = 2 * context * (tensor if args.sequence_parallel else 1)
    _require(
        context == 1 or args.seq_length % parts == 0,
        f"--context-parallel-size {context} needs a --seq-length that is a multiple of {parts}, got {args.seq_length}",
    )
    _require(
        args.num_layers >= pipeline,
        f"--pipeline-model-parallel-size {pipeline} has more stages than --num-layers {args.num_layers}",
    )
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        require_multiple(args, name, "tensor_model_parallel_size")
    _require(
        not args.sequence_parallel or args.seq_length % tensor == 0,
        f"--sequence-parallel splits --seq-length {args.seq_length} over --tensor-model-parallel-size {tensor}: "
        "the size must divide the length",
    )
    _require(
        has_cuda or args.distributed_backend != "nccl",
        "--distributed-backend nccl needs CUDA, and torch finds none on this machine: use gloo",
    )


def _check_experts(args: Arguments, has_cuda: bool) -> None:
    experts, expert_ranks = args.num_experts, args.expert_model_parallel_size
    _require(
        args.data_parallel_size % expert_ranks == 0 and (experts or 1) % expert_ranks == 0,
        f"--expert-model-parallel-size {expert_ranks} must divide the {args.data_parallel_size} data-parallel replicas "
        f"and --num-experts {experts}",
    )
    _require(
        experts is None or args.disable_bias_linear,
        f"--num-experts {experts} needs --disable-bias-linear: megatron-core's local experts have no working bias",
    )
    _require(
        not args.moe_grouped_gemm or has_cuda,
        "--moe-grouped-gemm needs CUDA: its kernel computes a rank's experts together; leave it out",
    )
    _require(
        experts is None or 1 <= args.moe_router_topk <= experts,
        f"--moe-router-topk {args.moe_router_topk} is not between 1 and --num-experts {experts}",
    )


def _check_replicas(args: Arguments) -> None:
    _require(
        not args.overlap_param_gather or (args.use_distributed_optimizer and args.overlap_grad_reduce),
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    )
    instances, replicas = args.num_distributed_optimizer_instances, args.data_parallel_size * args.context_parallel_size
    expert_ranks = args.expert_model_parallel_size
    _require(
        instances == 1 or args.use_distributed_optimizer,
        f"--num-distributed-optimizer-instances {instances} needs --use-distributed-optimizer, whose state it copies",
    )
    _require(
        replicas // expert_ranks % instances == 0 and replicas % instances == 0,
        f"--num-distributed-optimizer-instances {instances} must divide the {replicas} data- and context-parallel ranks"
        + (f" and the {replicas // expert_ranks} of them that share an expert" if expert_ranks > 1 else ""),
    )
    _require(
        not args.use_distributed_optimizer or args.optimizer == "adam",
        f"--use-distributed-optimizer needs --optimizer adam: megatron-core does not shard {args.optimizer}",
    )


def _check_batches(args: Arguments) -> None:
    replicas = args.data_parallel_size
    step = args.micro_batch_size * replicas
    assert args.global_batch_size is not None
    explanation = f"--micro-batch-size {args.micro_batch_size} x {replicas} data-parallel replicas = {step}"
    _require(
        args.global_batch_size % step == 0,
        f"--global-batch-size {args.global_batch_size} is not a multiple of {explanation}",
    )
    if args.rampup_batch_size is None:
        return
    start, increment, samples = args.rampup_batch_size
    ramp = f"--rampup-batch-size {start} {increment} {samples}"
    _require(min(start, increment, samples) >= 1, f"{ramp}: all three must be at least 1")
    _require(
        start % step == 0 and increment % step == 0, f"{ramp}: start and increment must be multiples of {explanation}"
    )
    growth = args.global_batch_size - start
    _require(
        growth > 0 and growth % increment == 0,
        f"{ramp}: {start} plus a multiple of {increment} is not --global-batch-size {args.global_batch_size}",
    )


def _check_training(args: Arguments) -> None:
    _require(not (args.bf16 and args.fp16), "--bf16 and --fp16: give one of them")
    _require(
        not args.recompute_activations or args.recompute_granularity == "selective",
        f"--recompute-activations is --recompute-granularity selective, but {args.recompute_granularity} is given",
    )
    _require(
        not args.grad_reduce_in_bf16 or args.bf16,
        "--grad-reduce-in-bf16 needs --bf16: gradients of other models are reduced in the model's own precision",
    )
    _require(
        not (args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32),
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32: give one of them",
    )
    check_learning_rate(args)
    check_profile(args)


_NOT_OF_ONE_LENGTH = {
    "reset_attention_mask": "a sample is one document",
    "reset_position_ids": "a sample is one document",
    "log_throughput": "it counts --seq-length tokens a sample",
}
"""Flags that are refused where samples differ in length, and why."""


def _check_data(args: Arguments) -> None:
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    given = [args.mock_data, bool(args.data_path), any(per_split)]
    _require(
        sum(given) == 1,
        "give the data once: --data-path PREFIX, or --train-data-path PREFIX (and --valid-data-path), or --mock-data",
    )
    for name, problem in _NOT_OF_ONE_LENGTH.items():
        _require(
            not (args.variable_seq_lengths and getattr(args, name)),
            f"{flag_name(name)} does not go with --variable-seq-lengths: {problem}",
        )
    needs_model = args.tokenizer_type in ("HuggingFaceTokenizer", "Llama2Tokenizer")
    _require(
        not needs_model or bool(args.tokenizer_model), f"--tokenizer-type {args.tokenizer_type} needs --tokenizer-model"
    )
    _require(
        not (args.no_create_attention_mask_in_dataloader and args.reset_attention_mask),
        "--no-create-attention-mask-in-dataloader and --reset-attention-mask, which needs masks: give one of them",
    )
    _require(args.tokenizer_type is not None, "--tokenizer-type is missing: HuggingFaceTokenizer, for example")
    if args.tokenizer_type == "NullTokenizer":
        _require(args.vocab_size is not None, "--tokenizer-type NullTokenizer (or --mock-data) needs --vocab-size")
