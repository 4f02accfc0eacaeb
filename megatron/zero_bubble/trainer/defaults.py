"""Completes the flags with defaults that depend on other flags or on the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.zero_bubble.session.environment import number_in
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.trainer.activations import check_activation
from megatron.zero_bubble.trainer.arguments import Arguments


def completed(args: Arguments, environment: Mapping[str, str], has_cuda: bool) -> Arguments:
    """Return the flags with the rank from `environment`, and with defaults for flags that are not given.

    Raises:
        ValueError: a default cannot be derived from the other flags, flags name several activations, or a variable in
            `environment` is wrong.
    """
    check_activation(args)
    rank, world_size = number_in(environment, "RANK", 0), number_in(environment, "WORLD_SIZE", 1)
    if rank >= world_size:
        raise ValueError(f"environment variable RANK={rank}: must be below WORLD_SIZE={world_size}")
    of_files = "GPT2BPETokenizer" if args.vocab_file and args.merge_file else None
    args = replace(
        args,
        rank=rank,
        world_size=world_size,
        local_rank=number_in(environment, "LOCAL_RANK", 0),
        max_position_embeddings=args.max_position_embeddings or args.seq_length,
        distributed_backend=args.distributed_backend or ("nccl" if has_cuda else "gloo"),
        tokenizer_type=args.tokenizer_type or ("NullTokenizer" if args.mock_data else of_files),
    )
    if not args.kv_channels:
        require_multiple(args, "hidden_size", "num_attention_heads")
    of_the_model: dict[str, Any] = {
        # Megatron's scripts may give --sequence-parallel even for one tensor-parallel rank, which has whole sequences.
        "sequence_parallel": args.sequence_parallel and args.tensor_model_parallel_size > 1,
        "kv_channels": args.kv_channels or args.hidden_size // args.num_attention_heads,
        "ffn_hidden_size": args.ffn_hidden_size or _mlp_width(args),
        "num_query_groups": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
    }
    if args.recompute_activations and args.recompute_granularity is None:
        of_the_model["recompute_granularity"] = "selective"
    if args.transformer_impl == "local" and args.attention_backend == "auto":
        of_the_model["attention_backend"] = "flash" if has_cuda and not unfused_attention(args) else "local"
    of_the_model["global_batch_size"] = args.global_batch_size or args.micro_batch_size * args.data_parallel_size
    return replace(args, **of_the_model)


def unfused_attention(args: Arguments) -> list[str]:
    """Return the names of the given flags that torch's fused attention does not compute."""
    is_given = {
        "window_size": args.window_size is not None,
        "softmax_type": args.softmax_type != "vanilla",
        "apply_query_key_layer_scaling": args.apply_query_key_layer_scaling,
    }
    return [name for name, given in is_given.items() if given]


def require_multiple(args: Arguments, name: str, divisor: str) -> None:
    """Raise `ValueError` unless the value of the flag `name` is a multiple of the value of the flag `divisor`."""
    value, by = getattr(args, name), getattr(args, divisor)
    if value % by != 0:
        raise ValueError(f"{flag_name(name)} {value} is not a multiple of {flag_name(divisor)} {by}")


def _mlp_width(args: Arguments) -> int:
    if not args.swiglu:
        return 4 * args.hidden_size
    # A gated MLP has three matrices instead of two, so two thirds of the width give the same number of parameters.
    return max(64, int(args.hidden_size * 8 / 3) // 64 * 64)


def with_vocabulary(args: Arguments, vocab_size: int) -> Arguments:
    """Return the flags with `padded_vocab_size` set for a tokenizer of `vocab_size` tokens.

    As in Megatron-LM, the vocabulary is padded so that the number of embedding rows on each tensor-parallel rank is a
    multiple of `--make-vocab-size-divisible-by`.
    """
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return replace(args, padded_vocab_size=math.ceil(vocab_size / multiple) * multiple)


def check_learning_rate(args: Arguments) -> None:
    """Refuse an impossible learning-rate schedule; `args` must have all defaults filled in.

    Raises:
        ValueError: a flag is out of range, or two flags contradict each other.
    """
    if args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    if args.decoupled_min_lr is not None and args.decoupled_lr is None:
        raise ValueError(f"--decoupled-min-lr {args.decoupled_min_lr} needs --decoupled-lr")
    name = "min_lr" if args.decoupled_min_lr is None else "decoupled_min_lr"
    if args.decoupled_lr is not None and getattr(args, name) > args.decoupled_lr:
        raise ValueError(f"{flag_name(name)} {getattr(args, name)} is above --decoupled-lr {args.decoupled_lr}")
    fraction, warmup, decay = args.lr_warmup_fraction, args.lr_warmup_iters, args.lr_decay_iters or args.train_iters
    if fraction is not None and not 0 <= fraction < 1:
        raise ValueError(f"--lr-warmup-fraction {fraction} must be in [0, 1)")
    if fraction is not None and warmup:
        raise ValueError(f"--lr-warmup-fraction {fraction} and --lr-warmup-iters {warmup}: give one of them")
    if warmup >= decay:
        raise ValueError(f"--lr-warmup-iters {warmup} must be below the {decay} iterations of decay")
