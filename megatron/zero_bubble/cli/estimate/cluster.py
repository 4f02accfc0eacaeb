"""Describes the devices of an estimated training, and the layers and bytes that each pipeline rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.job.layers import layers_of_layout, spread_layout
from megatron.zero_bubble.job.model_states import Parameters
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.model_size import StageLayers, stage_parameters


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
    """Return the layers of every stage, in model order.

    Raises:
        ValueError: the layers cannot be cut into these stages.
    """
    last = placement.num_stages - 1
    layers = _layers_of(args, placement)
    return [StageLayers(count, stage == 0, stage == last) for stage, count in enumerate(layers)]


def _layers_of(args: Arguments, placement: Placement) -> list[int]:
    stages, given = placement.num_stages, args.pipeline_model_parallel_layout
    if given is not None and placement.kind != "v":
        layers = layers_of_layout(given, placement.num_ranks)
        if len(layers) == stages:
            return layers
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if placement.kind == "linear" and (first is not None or last is not None):
        return _with_uneven_ends(args.num_layers, stages, first, last)
    layout = spread_layout(JobFlags.of(args), placement)
    return [args.num_layers // stages] * stages if layout is None else layers_of_layout(layout, placement.num_ranks)


def _with_uneven_ends(num_layers: int, stages: int, first: int | None, last: int | None) -> list[int]:
    ends = [count for count in (first, last) if count is not None]
    between = stages - len(ends)
    rest = num_layers - sum(ends)
    if (between and (rest <= 0 or rest % between)) or (not between and rest):
        raise ValueError(
            f"--num-layers {num_layers} leaves {rest} layers between the first and the last stage, "
            f"which {between} stages cannot share evenly"
        )
    middle = [rest // between] * between if between else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def rank_parameters(args: Arguments, placement: Placement) -> list[Parameters]:
    """Return the parameters of every pipeline rank, its chunks added up."""
    stages = stages_of(args, placement)
    ranks = [Parameters(0, 0)] * placement.num_ranks
    for stage, held in enumerate(stages):
        ranks[placement.rank_of(stage)] += stage_parameters(args, held)
    return ranks
