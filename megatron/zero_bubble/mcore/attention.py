"""Adds fused kernels and context parallelism to megatron-core's attention without Transformer Engine.

megatron-core itself has fused attention kernels and context parallelism only with Transformer Engine.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_batch_on_this_cp_rank

_TAKES_GROUP = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
"""Whether `get_batch_on_this_cp_rank` needs the context-parallel group, as it does from megatron-core 0.18 on. Without
a group, `get_batch_on_this_cp_rank` divides a batch among all ranks of the job."""


class ContextParallelAttention(DotProductAttention):
    """Attention without Transformer Engine, over a sequence that is divided among context-parallel ranks.

    Each context-parallel rank gathers all keys and values, so dividing the sequence saves no memory for keys and
    values. megatron-core's `get_batch_on_this_cp_rank` cuts the sequence into twice as many parts as there are
    context-parallel ranks. Context-parallel rank r holds the r-th part from the front and the r-th part from the back
    of the sequence, so that a causal mask gives all ranks equal work. The backward reduce-scatters the gradients of
    keys and values over the context-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        whole = copy.copy(config)
        whole.context_parallel_size = 1
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        super().__init__(whole, *args, pg_collection=groups, **kwargs)
        self._group: dist.ProcessGroup = groups.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention as `DotProductAttention` does, for this context-parallel rank's part of the sequence.

        Args:
            query, key, value: [sequence / ranks, batch, heads, channels]; `key` and `value` may have fewer heads than
                `query`.
            attention_mask: [batch, 1, sequence / ranks, sequence], True where attention is forbidden; None
                for a causal mask.

        Returns:
            The attention's output, [sequence / ranks, batch, heads * channels].
        """
        size = self._group.size()
        parts = [positions(len(query), rank, size, query.device) for rank in range(size)]
        gathered = torch.cat(parts)
        if attention_mask is None:
            attention_mask = gathered[None, :] > parts[self._group.rank()][:, None]
        else:
            attention_mask = attention_mask[..., gathered]
        key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=self._group) for x in (key, value))
        return super().forward(query, key, value, attention_mask, *args, **kwargs)


def cut_batch(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the part of a microbatch that this context-parallel rank computes with `ContextParallelAttention`."""
    if not _TAKES_GROUP:
        return get_batch_on_this_cp_rank(batch)
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def positions(length: int, rank: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the sequence positions of the `length` tokens that context-parallel rank `rank` holds."""
    half = length // 2
    first, last = rank * half, (2 * size - rank - 1) * half
    return torch.cat([torch.arange(start, start + half, device=device) for start in (first, last)])


class LocalAttention(DotProductAttention):
    """megatron-core's attention without Transformer Engine, with any number of value channels per head.

    In multi-head latent attention, values and keys of a head differ in their number of channels.

    Args:
        v_channels: number of channels of each head's values; if None, the configuration determines this number.
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class TorchAttention(LocalAttention):
    """Attention without Transformer Engine, computed by `torch.nn.functional.scaled_dot_product_attention`.

    On a GPU, torch uses a kernel that never writes the matrix of attention scores to memory.
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
        """Compute attention as `DotProductAttention` does.

        Args:
            query, key, value: [sequence, batch, heads, channels]; `key` and `value` may have fewer heads than `query`.
            attention_mask: a mask that can be broadcast to [batch, heads, queries, keys], True where attention is
                forbidden; None for a causal mask.

        Returns:
            The attention's output, [sequence, batch, heads * channels].
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
        """Return a context in which each tensor-parallel rank draws its own dropout mask."""
        # Under sequence parallelism, megatron-core forks the random state itself.
        if self.config.sequence_parallel:
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


class ContextParallelTorchAttention(ContextParallelAttention, TorchAttention):
    """Torch's fused attention over a sequence that is divided among context-parallel ranks."""


class ContextParallelLocalAttention(ContextParallelAttention, LocalAttention):
    """megatron-core's unfused attention over a sequence that is divided among context-parallel ranks."""


def core_attention(config: TransformerConfig, *, uses_torch: bool) -> type[DotProductAttention]:
    """Return the attention class for layers without Transformer Engine; `uses_torch` chooses torch's fused kernels."""
    if config.context_parallel_size > 1:
        return ContextParallelTorchAttention if uses_torch else ContextParallelLocalAttention
    if uses_torch:
        return TorchAttention
    return LocalAttention if config.multi_latent_attention else DotProductAttention
