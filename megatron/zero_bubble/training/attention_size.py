"""Computes what attention keeps and computes, by the kernel that runs it on a GPU.

Sizes are of one tensor-parallel rank and one microbatch, in a layer whose attention is not recomputed unless said.
"""

from __future__ import annotations

from enum import Enum

from megatron.zero_bubble.job.model_states import element_bytes
from megatron.zero_bubble.training.arguments import TORCH_BACKENDS, Arguments
from megatron.zero_bubble.training.model_size import attention_widths, rank_tokens


class AttentionKernel(Enum):
    """An implementation of attention; their memory and their products differ."""

    LOCAL = "megatron-core's own, which keeps the scores, and the softmax's output in fp32"
    TORCH = "a fused kernel of torch's scaled_dot_product_attention"
    TORCH_MATH = "torch's scaled_dot_product_attention where no fused kernel fits, which keeps the scores in fp32"
    TE_UNFUSED = "Transformer Engine's unfused one, which keeps the scores"
    TE_FLASH = "flash-attn in Transformer Engine"
    TE_FUSED = "cuDNN's in Transformer Engine"

    @property
    def keeps_scores(self) -> bool:
        return self in (AttentionKernel.LOCAL, AttentionKernel.TORCH_MATH, AttentionKernel.TE_UNFUSED)


def attention_kernel(args: Arguments) -> AttentionKernel:
    """Return the kernel that a training with these completed flags runs.

    Transformer Engine has no fused kernel in fp32. Torch has none for an explicit mask or fp32 with grouped queries.
    """
    half = element_bytes(args) == 2
    if args.transformer_impl == "transformer_engine":
        if not half or args.attention_backend == "unfused":
            return AttentionKernel.TE_UNFUSED
        return AttentionKernel.TE_FLASH if args.attention_backend == "flash" else AttentionKernel.TE_FUSED
    if args.attention_backend not in TORCH_BACKENDS:
        return AttentionKernel.LOCAL
    fits = not _is_grouped(args) or (half and not _has_mask(args))
    return AttentionKernel.TORCH if fits else AttentionKernel.TORCH_MATH


def attention_flops(args: Arguments) -> tuple[float, float]:
    """Return the floating-point operations of attention's products in F and in B; a multiply and an add are two.

    Without a fused kernel F computes two products of the whole matrix of scores, and B four. A fused kernel computes
    one of them again in B, and skips what a causal mask forbids unless it is given the mask as a tensor.
    """
    whole = 4.0 * rank_tokens(args) * args.seq_length * attention_widths(args)[0] / args.tensor_model_parallel_size
    if attention_kernel(args).keeps_scores:
        return whole, 2 * whole
    computed = whole if _has_mask(args) else whole / 2
    return computed, 2.5 * computed


def attention_activations(args: Arguments) -> float:
    """Return the bytes that a layer keeps between the linear layer of queries, keys and values and the projection.

    The projection's input is among them.
    """
    recomputed = args.recompute_granularity == "selective"
    kept = _recomputation_inputs(args) if recomputed else _kernel_inputs(args) + _inside(args)
    return (kept + _query_bytes(args)) / args.tensor_model_parallel_size


def _kernel_inputs(args: Arguments) -> float:
    """Bytes of queries, keys and values as the kernel keeps them."""
    kernel, query = attention_kernel(args), _query_bytes(args)
    key_ranks = 1 if _is_transformer_engine(args) else args.context_parallel_size
    if kernel is AttentionKernel.TORCH_MATH:
        return 4 / element_bytes(args) * (query + 2 * key_ranks * query)
    if kernel.keeps_scores and _is_grouped(args):
        return query + 2 * key_ranks * query  # keys and values are repeated for every head
    if key_ranks == 1:
        return _recomputation_inputs(args)
    # Keys and values are gathered from all context-parallel ranks.
    own = query if _copies_queries(args) else _projected_bytes(args)
    return own + 2 * key_ranks * _key_bytes(args)


def _recomputation_inputs(args: Arguments) -> float:
    """Bytes of queries, keys and values before the kernel.

    Local layers pass views of the linear layer's output; what is copied for the rotation or for grouped queries comes
    on top, because the values still hold the whole output.
    """
    if _is_transformer_engine(args):
        return _projected_bytes(args)
    copies = _query_bytes(args) if _copies_queries(args) else 0.0
    return _projected_bytes(args) + copies + (_key_bytes(args) if _is_rotated(args) else 0.0)


def _inside(args: Arguments) -> float:
    """Bytes that the kernel keeps beside queries, keys, values and the projection's input."""
    kernel, tokens, size = attention_kernel(args), rank_tokens(args), element_bytes(args)
    scores = float(tokens) * args.seq_length * args.num_attention_heads
    if kernel.keeps_scores:
        softmax = size if kernel is AttentionKernel.TE_UNFUSED else 4
        # Without dropout, what multiplies the values is the softmax's output, unless that has another data type.
        is_copied = args.attention_dropout > 0 or (kernel is AttentionKernel.LOCAL and softmax != size)
        product = 4 if kernel is AttentionKernel.TORCH_MATH else size
        return scores * (softmax + (product if is_copied else 0) + (1 if args.attention_dropout > 0 else 0))
    kept = 4.0 * tokens * args.num_attention_heads  # log-sum-exp in fp32; dropout keeps the state of its generator
    if kernel is AttentionKernel.TE_FLASH and args.micro_batch_size > 1:
        kept += _query_bytes(args)  # its output is transposed to be the projection's input
    if kernel is AttentionKernel.TORCH and _has_mask(args):
        masks = args.micro_batch_size if args.reset_attention_mask else 1
        kept += size * args.tensor_model_parallel_size * masks * tokens / args.micro_batch_size * args.seq_length
    return kept


def _has_mask(args: Arguments) -> bool:
    """Whether attention gets its mask as a tensor; otherwise the kernel knows that it is causal."""
    if _is_transformer_engine(args):
        return False
    return args.reset_attention_mask or args.context_parallel_size > 1


def _is_transformer_engine(args: Arguments) -> bool:
    return args.transformer_impl == "transformer_engine"


def _is_grouped(args: Arguments) -> bool:
    return args.num_query_groups != args.num_attention_heads


def _is_rotated(args: Arguments) -> bool:
    return args.position_embedding_type == "rope"


def _copies_queries(args: Arguments) -> bool:
    return _is_grouped(args) or _is_rotated(args)


def _query_bytes(args: Arguments) -> float:
    return float(element_bytes(args) * rank_tokens(args) * attention_widths(args)[0])


def _key_bytes(args: Arguments) -> float:
    return float(element_bytes(args) * rank_tokens(args) * attention_widths(args)[1])


def _projected_bytes(args: Arguments) -> float:
    """Bytes of the queries, keys and values that the linear layer computes."""
    return _query_bytes(args) + 2 * _key_bytes(args)
