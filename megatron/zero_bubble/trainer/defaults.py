"""Fills in defaults of flags that depend on other flags, on torchrun or on the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megatron.zero_bubble.trainer.arguments import Arguments


def completed(args: Arguments, environment: Mapping[str, str], has_cuda: bool) -> Arguments:
    """The flags with these defaults, and with the ranks from torchrun's `environment`, filled in.

    Raises:
        ValueError: a default cannot be derived.
    """
    args = replace(
        args,
        rank=int(environment.get("RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        max_position_embeddings=args.max_position_embeddings or args.seq_length,
        distributed_backend=args.distributed_backend or ("nccl" if has_cuda else "gloo"),
        tokenizer_type=args.tokenizer_type or _tokenizer_type(args),
    )
    of_the_model = {
        # One tensor rank has whole sequences; Megatron's scripts give the flag there, too.
        "sequence_parallel": args.sequence_parallel and args.tensor_model_parallel_size > 1,
        "kv_channels": args.kv_channels or _channels_per_head(args),
        "ffn_hidden_size": args.ffn_hidden_size or _mlp_width(args),
        "num_query_groups": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
    }
    if args.recompute_activations and args.recompute_granularity is None:
        of_the_model["recompute_granularity"] = "selective"
    if args.transformer_impl == "local" and args.attention_backend == "auto":
        of_the_model["attention_backend"] = "flash" if has_cuda else "local"
    args = args.changed(of_the_model)
    if args.global_batch_size is None:
        args = replace(args, global_batch_size=args.micro_batch_size * args.data_parallel_size)
    return args


def _tokenizer_type(args: Arguments) -> str | None:
    if args.mock_data:
        return "NullTokenizer"
    return "GPT2BPETokenizer" if args.vocab_file and args.merge_file else None


def _channels_per_head(args: Arguments) -> int:
    if args.hidden_size % args.num_attention_heads != 0:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads {args.num_attention_heads}"
        )
    return args.hidden_size // args.num_attention_heads


def _mlp_width(args: Arguments) -> int:
    if not args.swiglu:
        return 4 * args.hidden_size
    # A gated MLP has three matrices instead of two, so two thirds of the width keep the number of parameters.
    return max(64, int(args.hidden_size * 8 / 3) // 64 * 64)


def with_vocabulary(args: Arguments, vocab_size: int) -> Arguments:
    """The flags with `padded_vocab_size` set for a tokenizer of `vocab_size` tokens.

    The size is rounded up as Megatron does it: every tensor-parallel rank gets a multiple of the divisor.
    """
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return replace(args, padded_vocab_size=math.ceil(vocab_size / multiple) * multiple)
