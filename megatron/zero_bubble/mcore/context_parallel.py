"""Context parallelism for local attention, which megatron-core supports only with Transformer Engine."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import get_batch_on_this_cp_rank

_TAKES_GROUP = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
"""Whether megatron-core cuts for the ranks of a given group, from 0.18 on; without one, for all ranks of the job."""


class ContextParallelAttention(DotProductAttention):
    """Local attention over a sequence that context-parallel ranks share.

    Each rank gathers the keys and values of all ranks for its own queries, so it saves no memory for keys and values.
    The sequence is cut as megatron-core cuts it (`get_batch_on_this_cp_rank`): into twice as many parts as ranks,
    of which rank r holds the r-th from the front and the r-th from the back, for equal work under a causal mask.
    Backward sums the gradients of keys and values over the ranks and leaves each rank its part.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
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
        """Compute attention as megatron-core's class does, for this rank's part of the sequence.

        Args:
            query, key, value: [sequence / ranks, batch, heads, channels]; key and value may have fewer heads.
            attention_mask: [batch, 1, sequence / ranks, sequence], True where attention is forbidden; None
                for a causal mask.

        Returns:
            [sequence / ranks, batch, heads * channels].
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
    """Return this context-parallel rank's part of a microbatch, cut as `ContextParallelAttention` expects it."""
    if not _TAKES_GROUP:
        return get_batch_on_this_cp_rank(batch)
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def positions(length: int, rank: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the positions in the whole sequence of the `length` tokens that context-parallel rank `rank` holds."""
    half = length // 2
    first, last = rank * half, (2 * size - rank - 1) * half
    return torch.cat([torch.arange(start, start + half, device=device) for start in (first, last)])
