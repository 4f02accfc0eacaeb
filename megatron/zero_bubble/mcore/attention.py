"""Local attention through torch's fused kernels, for machines without Transformer Engine."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.zero_bubble.mcore.context_parallel import ContextParallelAttention


class LocalAttention(DotProductAttention):
    """megatron-core's local attention, also for values with other channels than --kv-channels, as latent ones have.

    Args:
        v_channels: channels of a head's values; None for as many as the configuration says.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class TorchAttention(LocalAttention):
    """megatron-core's local attention, computed by `torch.nn.functional.scaled_dot_product_attention`.

    On a GPU torch uses a kernel that never writes the matrix of scores to memory.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: None = None,
    ) -> torch.Tensor:
        """Compute attention as megatron-core's class does.

        Args:
            query, key, value: [sequence, batch, heads, channels]; key and value may have fewer heads.
            attention_mask: broadcast to [batch, heads, queries, keys], True where attention is forbidden; None for a
                causal mask.

        Returns:
            [sequence, batch, heads * channels].
        """
        assert attention_bias is None, "an attention bias is not supported"
        assert packed_seq_params is None, "packed sequences are not supported"
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        with self._random_state():
            context = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if attention_mask is None else ~attention_mask,
                dropout_p=self.attention_dropout.p if self.training else 0.0,
                is_causal=attention_mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return context.permute(2, 0, 1, 3).flatten(2).contiguous()

    def _random_state(self) -> contextlib.AbstractContextManager[Any]:
        """Let each tensor-parallel rank draw its own dropout, as it already does under sequence parallelism."""
        if self.config.sequence_parallel:
            return contextlib.nullcontext()
        fork: contextlib.AbstractContextManager[Any] = tensor_parallel.get_cuda_rng_tracker().fork()
        return fork


class ContextParallelTorchAttention(ContextParallelAttention, TorchAttention):
    """Torch's fused attention over a sequence that context-parallel ranks share."""


class ContextParallelLocalAttention(ContextParallelAttention, LocalAttention):
    """megatron-core's local attention over a sequence that context-parallel ranks share."""


def core_attention(config: TransformerConfig, *, uses_torch: bool) -> type[DotProductAttention]:
    """Return the class of core attention for local layers; `uses_torch` chooses torch's fused kernels."""
    if config.context_parallel_size > 1:
        return ContextParallelTorchAttention if uses_torch else ContextParallelLocalAttention
    if uses_torch:
        return TorchAttention
    return LocalAttention if config.multi_latent_attention else DotProductAttention
