"""Describes the devices of an estimated training, and the layers and bytes that each pipeline rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.job.layers import layers_of_layout, spread_layout
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.model_size import Parameters, StageLayers, element_bytes, stage_parameters


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


@dataclass(frozen=True)
class States:
    """Bytes that a rank keeps for each parameter between iterations, and how ZeRO divides them among ranks.

    ZeRO (Rajbhandari et al. 2020): the optimizer's part is divided among the d data-parallel ranks from stage 1 on,
    the gradients from stage 2, the parameters from stage 3; context-parallel ranks count as data-parallel ones. In
    mixed precision a parameter takes 2 bytes, its gradient 2, or 4 where gradients accumulate in fp32, and Adam 12:
    the fp32 copy and two moments. SGD has one moment, or none without momentum. Post-validation that rolls back from
    a snapshot on the device keeps the optimizer's part twice.
    """

    parameter: int
    gradient: int
    optimizer: int
    """Bytes of the optimizer's states, with the snapshot if there is one."""
    zero_stage: int

    @classmethod
    def of(cls, args: Arguments, zero_stage: int) -> States:
        size = element_bytes(args)
        in_fp32 = args.accumulate_allreduce_grads_in_fp32 or args.bf16 or size == 4
        num_moments = 2 if args.optimizer == "adam" else int(args.sgd_momentum > 0)
        snapshot = args.zero_bubble_post_validation and args.zero_bubble_rollback != "inverse"
        copied = 4 + 4 * num_moments if snapshot and not args.zero_bubble_rollback_on_host else 0
        return cls(size, 4 if in_fp32 else size, (4 if size == 2 else 0) + 4 * num_moments + copied, zero_stage)

    def bytes_a_parameter(self, replicas: int) -> float:
        """Return the bytes that one of `replicas` ranks holds for each parameter of its part of the model."""
        shared = [self.zero_stage >= stage for stage in (3, 2, 1)]
        parts = (self.parameter, self.gradient, self.optimizer)
        return sum(part / replicas if is_shared else part for part, is_shared in zip(parts, shared, strict=True))

    def of_rank(self, parameters: Parameters, replicas: int, expert_ranks: int) -> float:
        """Return the bytes of all states of a rank; `expert_ranks` of the `replicas` divide the experts among them."""
        expert = parameters.expert * self.bytes_a_parameter(max(1, replicas // expert_ranks))
        return parameters.dense * self.bytes_a_parameter(replicas) + expert


def rank_parameters(args: Arguments, placement: Placement) -> list[Parameters]:
    """Return the parameters of every pipeline rank, its chunks added up."""
    stages = stages_of(args, placement)
    ranks = [Parameters(0, 0)] * placement.num_ranks
    for stage, held in enumerate(stages):
        ranks[placement.rank_of(stage)] += stage_parameters(args, held)
    return ranks
