"""The state that all steps share in a run with vocabulary shards: the shard, the collectives and their lane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.zero_bubble.mcore.shard_collectives import ShardCollectives, open_collectives
from megatron.zero_bubble.mcore.vocabulary_model import (
    HiddenOutput,
    SummedEmbedding,
    VocabularyShard,
    embedding_of_first_stage,
    output_of_last_stage,
    vocabulary_shard_of,
)
from megatron.zero_bubble.runtime.exchange_lane import ExchangeLane, new_lane
from megatron.zero_bubble.schedule import Placement


@dataclass(frozen=True)
class VocabularyRun:
    """This rank's part of a run with vocabulary shards.

    Attributes:
        lane: where the collectives run, beside the computation.
        first_rank: pipeline rank of the first stage.
        last_rank: pipeline rank of the last stage.
        tensor_group: the tensor-parallel ranks, for gathering on the side of the computation.
        is_sequence_parallel: whether each of them has a part of the sequence between layers.
        is_fused: whether gradients of the output layer are added straight into `main_grad` (apex).
        embedding_layer: of this rank's first stage; None if that is on another rank.
        output_layer: of this rank's last stage; None if that is on another rank.
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
        """Wait for the lane and leave the groups, before the job's process groups are destroyed."""
        self.lane.close()
        self.collectives.close()


def open_vocabulary(
    chunks: Sequence[torch.nn.Module],
    placement: Placement,
    groups: ProcessGroupCollection,
    device: torch.device,
    timeout: timedelta,
) -> VocabularyRun | None:
    """Prepare a run of these model chunks, or return None if their vocabulary is not in shards.

    A collective call of the ranks of a pipeline and of their tensor-parallel ranks.

    Args:
        chunks: all model chunks of this rank, wrapped or not.
        timeout: for one collective.
    """
    shard = vocabulary_shard_of(chunks)
    if shard is None:
        return None
    config = get_model_config(chunks[0])
    collectives = open_collectives(groups, device, timeout)
    return VocabularyRun(
        shard=shard,
        collectives=collectives,
        lane=new_lane(device, collectives.close),
        first_rank=placement.rank_of(0),
        last_rank=placement.rank_of(placement.num_stages - 1),
        tensor_group=groups.tp,
        is_sequence_parallel=config.sequence_parallel,
        is_fused=config.gradient_accumulation_fusion,
        embedding_layer=embedding_of_first_stage(chunks),
        output_layer=output_of_last_stage(chunks),
    )
