"""Builds models and reduces gradients for placements that megatron-core does not have, such as a V.

With `p` pipeline ranks, megatron-core always assigns virtual stage `c * p + r` to chunk `c` of rank `r`. In a V of `p`
ranks, the stages of chunk 1 run from the last rank to the first, so chunk 1 of rank `r` is built as if its rank were
`p - 1 - r`. While chunk 1 is built, a `StagePosition` with the rank `p - 1 - r` takes the place of the pipeline's
process group. `StagePosition` has only a rank and a size, because megatron-core reads nothing else of the process
group. In a V, rank 0 has both the first and the last stage. If the last stage of a V also uses the embedding, in a tied
output layer or for multi-token prediction, rank 0 has two copies of the embedding. The gradients of the two copies of
the embedding are added locally, whereas megatron-core would all-reduce the gradients between the first and the last
rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

from megatron.zero_bubble.mcore.decoder_models import DECODER_MODELS
from megatron.zero_bubble.runtime.joint import from_all_ranks
from megatron.zero_bubble.schedule import Placement


@dataclass(frozen=True)
class StagePosition:
    """Replaces the pipeline group while a chunk is built; megatron-core builds the chunk for rank `position`."""

    position: int
    num_ranks: int

    def rank(self) -> int:
        return self.position

    def size(self) -> int:
        return self.num_ranks


def chunk_groups(placement: Placement, rank: int, chunk: int) -> ProcessGroupCollection:
    """Return the process groups with which a chunk of rank `rank` is built; `rank` need not be the caller's rank."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    position = placement.stage_of(rank, chunk) % placement.num_ranks
    if (position, placement.num_ranks) != (groups.pp.rank(), groups.pp.size()):
        groups = copy.copy(groups)
        groups.pp = StagePosition(position, placement.num_ranks)
    return groups


def embedding_ranks(placement: Placement) -> Callable[[list[int], int | None], list[int]] | None:
    """Return the function by which `initialize_model_parallel` chooses the ranks of an embedding group.

    If `embedding_ranks` returns None, megatron-core chooses its default, the first and the last rank of a pipeline.
    """
    first, last = placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
    if first != last:
        return None

    def only_the_first(ranks: list[int], split_rank: int | None = None) -> list[int]:
        return [ranks[first]]

    return only_the_first


def adopt_placement(placement: Placement) -> None:
    """Set the parallel state for a placement that was chosen after megatron-core's initialization; a collective call.

    Call `adopt_placement` before any model is built. The earlier call of `initialize_model_parallel` must have placed
    the first and the last stage on different ranks. The embedding groups, which reduce the gradients of tied
    embeddings, are created again if the chosen placement has the first and the last stage on one rank.
    """
    num_chunks = placement.num_chunks if placement.num_chunks > 1 else None
    parallel_state.set_virtual_pipeline_model_parallel_world_size(num_chunks)
    parallel_state.set_virtual_pipeline_model_parallel_rank(None if num_chunks is None else 0)
    choose = embedding_ranks(placement)
    if choose is None:
        return
    own = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    pipelines = from_all_ranks(own)
    parallel_state._EMBEDDING_GROUP = parallel_state._EMBEDDING_GLOBAL_RANKS = None
    for pipeline in sorted({tuple(ranks) for ranks in pipelines}):
        ranks = choose(list(pipeline), None)
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            parallel_state._EMBEDDING_GROUP, parallel_state._EMBEDDING_GLOBAL_RANKS = group, ranks


def copy_tied_embedding(chunks: Sequence[torch.nn.Module]) -> None:
    """Copy tied embedding weights from the first to the last stage, if both stages are on this rank.

    megatron-core sets the last stage's copy of the embedding to zero and fills the copy by an all-reduce between ranks.
    """
    tied = tied_weights(chunks)
    if tied is not None:
        embedding, last = tied
        last.data.copy_(embedding.data)


def check_layers_built(num_layers: int, placement: Placement, chunks: Sequence[torch.nn.Module]) -> None:
    """Check that a model's stages have `num_layers` decoder layers in all; a collective call of each pipeline's ranks.

    Layers of multi-token prediction, and models whose class is not in `DECODER_MODELS`, are not checked.

    Raises:
        ValueError: the stages do not have `num_layers` decoder layers in all; raised on all ranks of the pipeline.
    """
    models = [unwrap_model(chunk) for chunk in chunks]
    if not all(isinstance(model, DECODER_MODELS) for model in models):
        return
    group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["pp"]).pp
    of_ranks = from_all_ranks([len(model.decoder.layers) for model in models], group)
    built = [of_ranks[placement.rank_of(stage)][placement.chunk_of(stage)] for stage in range(placement.num_stages)]
    if sum(built) != num_layers:
        raise ValueError(
            f"--num-layers {num_layers}, but stages of {', '.join(map(str, built))} layers were built, {sum(built)} in "
            "all: check the flags that give the layers, such as --hybrid-layer-pattern, and spread them over stages"
        )


def finalize_gradients(
    config: Any,
    placement: Placement,
    chunks: list[Any],
    num_tokens: torch.Tensor | None,
    groups: ProcessGroupCollection,
    force_all_reduce: bool | None,
) -> None:
    """Run `config.finalize_model_grads_func` at the end of a step, for any placement; a collective call.

    Args:
        num_tokens: number of tokens in this replica's step, valid only on the last stage's rank; None if the loss is
            not averaged per token.
    """
    holder = placement.rank_of(placement.num_stages - 1)
    # megatron-core takes the number of tokens from the last rank.
    is_usual = holder == placement.num_ranks - 1
    known = num_tokens if is_usual else None
    config.finalize_model_grads_func(chunks, known, pg_collection=groups, force_all_reduce=force_all_reduce)
    if is_usual:
        return
    tied = tied_weights(chunks)
    if tied is not None and any(weight.requires_grad for weight in tied):
        embedding, last = (weight.main_grad for weight in tied)
        embedding.add_(last)
        last.copy_(embedding)
    if num_tokens is not None:
        dist.broadcast(num_tokens, src=dist.get_global_rank(groups.pp, holder), group=groups.pp)
        dist.all_reduce(num_tokens, group=groups.dp_cp)
        for chunk in chunks if num_tokens > 0 else ():
            chunk.scale_gradients(1.0 / num_tokens)


def tied_weights(chunks: Sequence[torch.nn.Module]) -> tuple[Any, Any] | None:
    """Return the embedding's weights in the first and the last stage, if these stages are two chunks of this rank.

    The last stage uses the embedding's weights in a tied output layer, or to embed tokens for multi-token prediction.
    """
    first = [chunk for chunk in chunks if get_attr_wrapped_model(chunk, "pre_process")]
    last = [chunk for chunk in chunks if get_attr_wrapped_model(chunk, "post_process")]
    if not first or not last or first[0] is last[0]:
        return None
    begin, end = unwrap_model(first[0]), unwrap_model(last[0])
    if not end.share_embeddings_and_output_weights and not end.mtp_process:
        return None
    return begin.shared_embedding_or_output_weight(), end.shared_embedding_or_output_weight()


class PlacedLayout(PipelineParallelLayerLayout):
    """A layout for any placement: each chunk of a rank gets the layers of the stage that the chunk computes.

    Args:
        stages: the layers of each stage, in model order, in one of megatron-core's notations.
        rank: the pipeline rank whose layers are requested; it may differ from this process's rank.
    """

    layout: list[list[list[LayerType]]]

    def __init__(self, stages: str | list[list[LayerType]], placement: Placement, rank: int) -> None:
        super().__init__(stages, placement.num_ranks)
        self._placement, self._rank = placement, rank
        self._stages = [row[chunk] for chunk in range(placement.num_chunks) for row in self.layout]
        # megatron-core reads this attribute, too, to find the layers of multi-token prediction.
        self.layout = [
            [self._stages[stage] for stage in placement.stages_of(holder)] for holder in range(placement.num_ranks)
        ]

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        return self._stages[self._stage(vp_stage, pp_rank)].count(layer_type)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        return sum(stage.count(layer_type) for stage in self._stages[: self._stage(vp_stage, pp_rank)])

    def _stage(self, vp_stage: int | None, pp_rank: int | None) -> int:
        return self._placement.stage_of(self._rank if pp_rank is None else pp_rank, vp_stage or 0)


def place_layout(config: TransformerConfig, placement: Placement, rank: int) -> None:
    """If `config` has a layout, replace this layout by the layout of rank `rank` under `placement`."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        config.pipeline_model_parallel_layout = PlacedLayout(layout.input_data, placement, rank)
