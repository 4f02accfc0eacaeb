"""Refuses models that are too large before they are planned and built, which takes long and prints nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from megatron.zero_bubble.session.model_states import element_bytes
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.model_count import attention_kernel, rank_tokens


def check_memory(args: Arguments) -> None:
    """Refuse a model if a lower bound on its memory exceeds the memory of a rank.

    The vocabulary counts once the tokenizer is known.

    Raises:
        ValueError: a part is too large; the message names the flags that make it so.
    """
    available, place = _memory()
    for num_bytes, what, flags in _smallest_needs(args):
        if num_bytes > available:
            raise ValueError(
                f"{flags}: {what} take at least {num_bytes / 2**30:,.0f} GiB on a rank, "
                f"and {place} has {available / 2**30:,.0f}"
            )


def host_memory() -> int:
    """Bytes of this machine's main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory() -> tuple[int, str]:
    """The bytes of memory in which a rank computes, and its name for messages."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, "a device"
    return host_memory(), "this machine"


def _smallest_needs(args: Arguments) -> Iterator[tuple[float, str, str]]:
    """Iterate over lower bounds of a rank's memory: bytes, their content, and the flags that determine them."""
    size, tensor = element_bytes(args), args.tensor_model_parallel_size
    states = 2 * size  # a parameter and its gradient
    layer = _least_parameters(args) / tensor * states
    widths = f"--hidden-size {args.hidden_size} --ffn-hidden-size {args.ffn_hidden_size}"
    experts = "" if args.num_experts is None else f" --num-experts {args.num_experts}"
    held = "parameters and gradients"
    # At least one rank has the average number of layers or more.
    layers = -(-args.num_layers // args.pipeline_model_parallel_size)
    yield layers * layer, held, f"--num-layers {args.num_layers} {widths}{experts}"
    if args.mtp_num_layers is not None:
        yield args.mtp_num_layers * layer, held, f"--mtp-num-layers {args.mtp_num_layers} {widths}{experts}"
    assert args.max_position_embeddings is not None
    rows = args.padded_vocab_size / tensor
    if args.position_embedding_type == "learned_absolute":
        rows += args.max_position_embeddings
    yield (
        rows * args.hidden_size * states,
        "embeddings and their gradients",
        f"--hidden-size {args.hidden_size} with a vocabulary of {args.padded_vocab_size} and positions up to "
        f"{args.max_position_embeddings}",
    )
    tokens = rank_tokens(args)
    batch = f"--micro-batch-size {args.micro_batch_size} --seq-length {args.seq_length}"
    yield tokens * args.hidden_size * size / tensor, "hidden states", f"{batch} --hidden-size {args.hidden_size}"
    yield tokens * args.padded_vocab_size * size / tensor, "logits", f"{batch}, {args.padded_vocab_size} tokens"
    if attention_kernel(args).keeps_scores:
        scores = tokens * args.seq_length * args.num_attention_heads * size / tensor
        heads = f"{batch} --num-attention-heads {args.num_attention_heads} --attention-backend {args.attention_backend}"
        yield scores, "the attention scores of a layer", heads


def _least_parameters(args: Arguments) -> float:
    """A lower bound of a layer's parameters, all tensor-parallel ranks together.

    Parts that only some layers have are left out. `model_count.py` counts all parameters exactly.
    """
    assert args.kv_channels is not None
    assert args.ffn_hidden_size is not None
    heads = 0 if args.multi_latent_attention else 2 * (args.num_attention_heads + args.num_query_groups)
    experts = 1 if args.num_experts is None else args.num_experts // args.expert_model_parallel_size
    if args.moe_layer_freq != 1 or args.hybrid_layer_pattern is not None:
        experts = 0  # some layers have none
    if args.hybrid_layer_pattern is not None:
        heads = 0
    width = args.ffn_hidden_size if args.num_experts is None else args.moe_ffn_hidden_size or args.ffn_hidden_size
    return args.hidden_size * (heads * args.kv_channels + experts * (3 if args.swiglu else 2) * width)
