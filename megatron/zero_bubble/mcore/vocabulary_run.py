"""Holds this rank's vocabulary shard, and the collectives between shards, for all steps of a run.

The collectives run in a lane, which is a CUDA stream or a thread beside the computation.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.zero_bubble.mcore.vocabulary_model import (
    HiddenOutput,
    SummedEmbedding,
    VocabularyShard,
    replacement,
    vocabulary_shard_of,
)
from megatron.zero_bubble.runtime.collectives import Collectives, TorchCollectives
from megatron.zero_bubble.runtime.exchange_lane import ExchangeLane, new_lane
from megatron.zero_bubble.schedule import Placement

_Module = TypeVar("_Module", bound=torch.nn.Module)


@dataclass(frozen=True)
class VocabularyRun:
    """This rank's vocabulary shard, and the shards' collectives, which all steps of a run use.

    Attributes:
        lane: the CUDA stream or thread in which the collectives run, beside the computation.
        first_rank: pipeline rank of the first stage.
        last_rank: pipeline rank of the last stage.
        tensor_group: the tensor-parallel group for gathers that run as part of an operation, not in `lane`.
        is_sequence_parallel: whether, between layers, each tensor-parallel rank has only a part of the sequence.
        is_fused: whether apex's kernel adds the gradients of the output layer straight into `main_grad`.
        embedding_layer: replaces the embedding in the first stage; None if the first stage is on another rank.
        output_layer: replaces the output layer in the last stage; None if the last stage is on another rank.
    """

    shard: VocabularyShard
    collectives: ShardCollectives
    lane: ExchangeLane
    first_rank: int
    last_rank: int
    tensor_group: dist.ProcessGroup
    is_sequence_parallel: bool
    is_fused: bool
    embedding_layer: SummedEmbedding | None
    output_layer: HiddenOutput | None

    def close(self) -> None:
        """Wait until all submitted collectives have run, then close the shards' process groups."""
        self.lane.close()
        self.collectives.close()


def open_vocabulary(
    chunks: Sequence[torch.nn.Module],
    placement: Placement,
    groups: ProcessGroupCollection,
    device: torch.device,
    timeout: timedelta,
) -> VocabularyRun | None:
    """Open the collectives between vocabulary shards; return None if the vocabulary of the model is not sharded.

    All ranks of a pipeline, and all ranks of their tensor-parallel groups, call `open_vocabulary` together.

    Args:
        chunks: all model chunks of this rank, wrapped or not.
        timeout: time limit for one collective.
    """
    shard = vocabulary_shard_of(chunks)
    if shard is None:
        return None
    config = get_model_config(chunks[0])
    embedding_layer, output_layer = replacement(SummedEmbedding, chunks), replacement(HiddenOutput, chunks)
    collectives = open_collectives(groups, device, timeout)
    return VocabularyRun(
        shard=_weak(shard),
        collectives=collectives,
        lane=new_lane(device, collectives.close),
        first_rank=placement.rank_of(0),
        last_rank=placement.rank_of(placement.num_stages - 1),
        tensor_group=groups.tp,
        is_sequence_parallel=config.sequence_parallel,
        is_fused=config.gradient_accumulation_fusion,
        embedding_layer=None if embedding_layer is None else _weak(embedding_layer),
        output_layer=None if output_layer is None else _weak(output_layer),
    )


def _weak(module: _Module) -> _Module:
    """A proxy of a part of the model that does not keep the model in memory when the training loop drops the model."""
    return cast(_Module, weakref.proxy(module))


@dataclass(frozen=True)
class ShardCollectives:
    """Collectives among the vocabulary shards, in process groups that only the `ExchangeLane` of this rank uses."""

    pipeline: Collectives
    tensor: Collectives | None
    """Collectives of the tensor-parallel group; None without tensor parallelism."""

    def gather_statistics(self, statistics: torch.Tensor) -> torch.Tensor:
        """Return the softmax statistics of all shards, in the order of shards, [shards, *statistics.shape]."""
        gathered = statistics.new_empty(self.pipeline.size, *statistics.shape)
        self.pipeline.gather_all(statistics, gathered)
        if self.tensor is None:
            return gathered
        of_all = gathered.new_empty(self.tensor.size, *gathered.shape)
        self.tensor.gather_all(gathered, of_all)
        return of_all.flatten(0, 1)

    def sum_to(self, terms: torch.Tensor, root: int, *, splits_sequence: bool) -> torch.Tensor:
        """On the pipeline rank `root`, return the sum of all shards' terms; on other ranks, the result is undefined.

        The sum over the pipeline ranks comes first, then the sum over the tensor ranks, both in the order of ranks.

        Args:
            terms: [tokens, hidden], changed in place.
            splits_sequence: whether to return only this tensor rank's part of the tokens, as sequence parallelism
                requires.
        """
        self.pipeline.sum_to(terms, root)
        if self.tensor is None or self.pipeline.rank != root:
            return terms
        if splits_sequence:
            parts = terms.chunk(self.tensor.size)
            for rank, part in enumerate(parts):
                self.tensor.sum_to(part, rank)
            # A copy, because a part would keep the whole tensor in memory.
            return parts[self.tensor.rank].clone()
        self.tensor.sum_to(terms, 0)
        self.tensor.broadcast(terms, 0)
        return terms

    def close(self) -> None:
        """Leave the shards' process groups, so that later collectives of other ranks fail.

        `close` must not be called while a collective runs on this rank.
        """
        self.pipeline.close()
        if self.tensor is not None:
            self.tensor.close()


def open_collectives(groups: ProcessGroupCollection, device: torch.device, timeout: timedelta) -> ShardCollectives:
    """Create the shards' process groups, with the ranks of megatron-core's groups; a collective call of these ranks."""
    tensor = TorchCollectives.like(groups.tp, device, timeout) if groups.tp.size() > 1 else None
    return ShardCollectives(TorchCollectives.like(groups.pp, device, timeout), tensor)


def made_up_collectives(real: ShardCollectives) -> ShardCollectives:
    """Return collectives that replace `real` without communicating; they yield zeros or this rank's own tensors."""
    tensor = None if real.tensor is None else _MadeUpRanks(real.tensor)
    return ShardCollectives(_MadeUpRanks(real.pipeline), tensor)


class _MadeUpRanks:
    """Collectives without communication."""

    def __init__(self, real: Collectives) -> None:
        self.rank, self.size = real.rank, real.size

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.rank != root:
            tensor.zero_()

    def gather_all(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered.copy_(tensor.expand_as(gathered))

    def sum_to(self, tensor: torch.Tensor, root: int) -> None:
        return

    def close(self) -> None:
        return
