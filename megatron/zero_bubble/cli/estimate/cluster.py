"""Describes the devices of an estimated training, and the layers and bytes that each pipeline rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.job.layers import layers_of_layout, partition_of_flags
from megatron.zero_bubble.job.model_states import Parameters
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.model_size import StageLayers, stage_parameters, vocabulary_table


@dataclass(frozen=True)
class Cluster:
    """Equal devices, each with one link to the others."""

    memory: float
    """Bytes of memory of one device."""
    reserved: float
    """Bytes of that memory which no tensor gets: context, communication buffers, fragments."""
    flops: float
    """Floating-point operations a second that layers reach."""
    bandwidth: float
    """Bytes a second of a message to another device."""
    latency: float
    """Seconds that an empty message takes."""

    def message_ms(self, num_bytes: float) -> float:
        return 1e3 * (self.latency + num_bytes / self.bandwidth)


def stages_of(args: Arguments, placement: Placement) -> list[StageLayers]:
    """Return the part of the model in every stage, in model order.

    Raises:
        ValueError: the layers cannot be cut into these stages.
    """
    last, is_whole = placement.num_stages - 1, not args.vocabulary_parallel
    layers = _layers_of(args, placement)
    return [StageLayers(count, stage == 0, stage == last, is_whole) for stage, count in enumerate(layers)]


def _layers_of(args: Arguments, placement: Placement) -> Sequence[int]:
    given = args.pipeline_model_parallel_layout
    if given is not None:
        layers = layers_of_layout(given, placement.num_ranks)
        if len(layers) == placement.num_stages:
            return layers
    return partition_of_flags(replace(JobFlags.of(args), pipeline_model_parallel_layout=None), placement)


def rank_parameters(args: Arguments, placement: Placement) -> list[Parameters]:
    """Return the parameters of every pipeline rank, its chunks and its vocabulary shard added up."""
    shard = Parameters(0, 0)
    if args.vocabulary_parallel:
        tables = 2 if args.untie_embeddings_and_output_weights else 1
        shard = Parameters(tables * vocabulary_table(args) // placement.num_ranks, 0)
    ranks = [shard] * placement.num_ranks
    for stage, part in enumerate(stages_of(args, placement)):
        ranks[placement.rank_of(stage)] += stage_parameters(args, part)
    return ranks
