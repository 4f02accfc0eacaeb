"""Converts flags to a partition (the layers of every stage), and a partition to megatron-core's layout notation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron.zero_bubble.schedule import Placement, ScheduleError, model_costs
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.schedule.model_costs import Partition
from megatron.zero_bubble.session.flags import CHUNK_FLAGS, ParallelFlags, flag_name
from megatron.zero_bubble.session.job_flags import JobFlags

WITHOUT_PARTITION: dict[str, Any] = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Default values of the flags that set the number of layers of the first and the last stage."""
_MOST_REPEATS = 10_000
"""Largest accepted repeat count in a layout string, such as the 8 in `t*8`."""


def partition_of_flags(flags: JobFlags, placement: Placement) -> Partition:
    """The number of layers that the flags give to each stage, in model order.

    Raises:
        ValueError: flags contradict each other, or their layers do not add up to `--num-layers`; the message names the
            flags.
    """
    sources = partition_sources(flags)
    if len(sources) > 1:
        raise ValueError(f"{sources[0]} and {sources[-1]} both say how many layers a stage has: give one of them")
    if flags.pipeline_model_parallel_layout is not None:
        layout = flags.pipeline_model_parallel_layout
        layers = layers_of_layout(layout, placement.num_ranks)
        return _checked(flags, layers, placement, f"--pipeline-model-parallel-layout {layout} has")
    if flags.pattern is not None and flags.pattern.is_divided:
        given = f"--hybrid-layer-pattern {flags.hybrid_layer_pattern} has"
        return _checked(flags, flags.pattern.partition, placement, given)
    return _of_ends(flags, placement) if _layers_of_ends(flags) else _spread(flags, placement)


def needed_layout(flags: JobFlags, placement: Placement, partition: Partition) -> str | None:
    """The `--pipeline-model-parallel-layout` with which megatron-core builds `partition`; None if no layout is needed.

    megatron-core expects the multi-token prediction layers on the last rank, but in a V placement the first rank holds
    the last stage.
    """
    if flags.pipeline_model_parallel_layout is not None or flags.pattern is not None:
        return flags.pipeline_model_parallel_layout
    is_default = len(set(partition)) == 1 and (placement.kind != "v" or flags.mtp_num_layers is None)
    return None if is_default else to_layout(partition, flags.mtp_num_layers)


def partition_sources(flags: JobFlags) -> list[str]:
    """The flags that set the number of layers of the stages; each entry is text with the flag and its value.

    Flags that a user may combine share one entry in the returned list.
    """
    layout = flags.pipeline_model_parallel_layout
    sources = list(_layers_of_ends(flags))[:1]
    if layout is not None:
        sources.append(f"--pipeline-model-parallel-layout {layout}")
    if flags.pattern is not None and flags.pattern.is_divided:
        sources.append(f"--hybrid-layer-pattern {flags.hybrid_layer_pattern}")
    if flags.account_for_embedding_in_pipeline_split or flags.account_for_loss_in_pipeline_split:
        sources.append("--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split")
    return sources


def _checked(flags: JobFlags, layers: Partition, placement: Placement, given: str) -> Partition:
    """Return the partition `layers`; raise `ValueError` if its number of stages or of layers is wrong."""
    if len(layers) != placement.num_stages:
        raise ValueError(
            f"{given} {len(layers)} stages, but {placement.num_ranks} pipeline ranks with {placement.num_chunks} model "
            f"chunks each hold {placement.num_stages}"
        )
    if sum(layers) != flags.num_layers:
        raise ValueError(f"{given} {sum(layers)} layers, but --num-layers is {flags.num_layers}")
    return layers


def _layers_of_ends(flags: JobFlags) -> dict[str, int]:
    """Text with a flag and its value -> number of layers that the flag sets for the first or the last rank."""
    first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
    ends = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    return {f"{flag} {value}": value for flag, value in ends.items() if value is not None}


def _of_ends(flags: JobFlags, placement: Placement) -> Partition:
    """The partition for a given number of layers of the first or last rank (in a V, of the first or last stage)."""
    chunks, places, noun = placement.num_chunks, placement.num_ranks, "pipeline ranks"
    if placement.kind == "v":
        chunks, places, noun = 1, placement.num_stages, "stages"
    ends = _layers_of_ends(flags)
    given = " and ".join(ends)
    rest, others = flags.num_layers - sum(ends.values()), places - len(ends)
    fits = rest > 0 and rest % others == 0 if others > 0 else rest == others == 0
    if not fits:
        raise ValueError(
            f"of --num-layers {flags.num_layers}, {given} leaves {rest} for {others} other {noun}: "
            "each needs the same number of layers, at least one"
        )
    layers = [rest // others if others > 0 else 0] * places
    for end, number in ((0, flags.decoder_first_pipeline_num_layers), (-1, flags.decoder_last_pipeline_num_layers)):
        layers[end] = layers[end] if number is None else number
    if any(number % chunks for number in layers):
        numbers = ", ".join(map(str, dict.fromkeys(layers)))
        raise ValueError(f"{given}: {noun} with {numbers} layers cannot be cut into {chunks} even model chunks each")
    return tuple(number // chunks for number in layers) * chunks


def _spread(flags: JobFlags, placement: Placement) -> Partition:
    """The most even partition that the flags allow."""
    stages, layers = placement.num_stages, flags.num_layers
    embedding, loss = flags.account_for_embedding_in_pipeline_split, flags.account_for_loss_in_pipeline_split
    if (layers + embedding + loss) % stages and not flags.allow_padding_num_layers:
        counted = f"--num-layers {layers} is"
        if embedding or loss:
            counted = (
                f"--num-layers {layers} and, by --account-for-embedding-in-pipeline-split and "
                f"--account-for-loss-in-pipeline-split, {embedding + loss} more are"
            )
        raise ValueError(
            f"{counted} not a multiple of the {stages} stages that --pipeline-model-parallel-size "
            f"{placement.num_ranks} and {placement.num_chunks} model chunks a rank give; --allow-padding-num-layers "
            "spreads them unevenly"
        )
    return spread_layers(layers, stages, flags.hybrid_layer_pattern, embedding=embedding, loss=loss)


def spread_layers(
    num_layers: int, num_stages: int, pattern: str | None = None, *, embedding: bool = False, loss: bool = False
) -> Partition:
    """Spread layers evenly over stages.

    An error message names `--hybrid-layer-pattern` if `pattern` is given; otherwise, the message names `--num-layers`.
    """
    try:
        return model_costs.spread_layers(num_layers, num_stages, embedding=embedding, loss=loss)
    except ScheduleError as error:
        raise too_few_layers(num_layers, pattern, error) from error


def too_few_layers(num_layers: int, pattern: str | None, error: ScheduleError) -> ValueError:
    """The error for a model with fewer layers than stages; the message names the flag that sets the layers."""
    given = f"--num-layers {num_layers}" if pattern is None else f"--hybrid-layer-pattern {pattern}"
    return ValueError(f"{given}: {error}: give more layers, or fewer pipeline ranks or model chunks")


def to_layout(layers: Sequence[int], num_further_tokens: int | None = None) -> str:
    """Convert `layers`, the number of layers of each stage, to the notation of `--pipeline-model-parallel-layout`.

    The last stage also gets `num_further_tokens` layers of multi-token prediction.
    """
    further = "m" * (num_further_tokens or 0)
    return f"E{'|'.join(f't*{count}' if count else '' for count in layers)}{further}L"


def layers_of_layout(layout: str, num_ranks: int) -> Partition:
    """The number of layers of each stage in a layout of megatron-core, in model order.

    Raises:
        ValueError: megatron-core cannot read the layout, or a repeat count is too large.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    for repeats in re.findall(r"\*(\d+)", layout):
        # megatron-core expands repeats, so a huge number would fill the memory.
        if len(repeats) > len(str(_MOST_REPEATS)) or int(repeats) > _MOST_REPEATS:
            raise ValueError(
                f"--pipeline-model-parallel-layout {layout} repeats something {repeats} times: at most {_MOST_REPEATS}"
            )
    try:
        rows = PipelineParallelLayerLayout(layout, num_ranks).layout
    except (AssertionError, ValueError, KeyError) as error:
        reason = one_line(error)
        raise ValueError(f"--pipeline-model-parallel-layout {layout}: megatron-core refuses it: {reason}") from error
    return tuple(row[chunk].count(LayerType.decoder) for chunk in range(len(rows[0])) for row in rows)


def check_chunk_flags(flags: ParallelFlags) -> None:
    """Raise `ValueError` if several flags set the number of model chunks on a rank."""
    names = (*CHUNK_FLAGS, "pipeline_model_parallel_layout")
    given = [flag_name(name) for name in names if getattr(flags, name) is not None]
    if len(given) > 1:
        raise ValueError(f"give {given[0]} or {given[1]}, not both")


def chunks_of_flags(flags: JobFlags) -> int | None:
    """The number of model chunks on a rank; None unless Megatron's flags ask for several chunks.

    Raises:
        ValueError: the flags contradict each other, or the layers cannot be divided into the stages that the flags ask
            for.
    """
    per_rank, per_chunk = flags.num_virtual_stages_per_pipeline_rank, flags.num_layers_per_virtual_pipeline_stage
    pipeline, layout = flags.pipeline_model_parallel_size, flags.pipeline_model_parallel_layout
    if flags.pattern is not None and flags.pattern.is_divided:
        per_rank = len(flags.pattern.stages) // pipeline
        return per_rank if per_rank > 1 else None
    if layout is not None:
        per_rank = len(layers_of_layout(layout, pipeline)) // pipeline
        return per_rank if per_rank > 1 else None
    if per_chunk is not None:
        ends = flags.account_for_embedding_in_pipeline_split + flags.account_for_loss_in_pipeline_split
        if not flags.allow_padding_num_layers and (flags.num_layers + ends) % (pipeline * per_chunk) != 0:
            counted = f", with {ends} for the embedding and the loss," if ends else ""
            raise ValueError(
                f"--num-layers {flags.num_layers}{counted} is not a multiple of --pipeline-model-parallel-size "
                f"{pipeline} x --num-layers-per-virtual-pipeline-stage {per_chunk}"
            )
        per_rank = -(-(flags.num_layers + ends) // (pipeline * per_chunk))
    if per_rank is not None and per_rank > 1 and pipeline < 2:
        raise ValueError(f"several model chunks a rank need --pipeline-model-parallel-size above 1, got {pipeline}")
    # The embedding and the loss may each have a stage of their own.
    if per_rank is not None and per_rank * pipeline > flags.num_layers + 2:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {per_rank} x --pipeline-model-parallel-size {pipeline} are more "
            f"stages than --num-layers {flags.num_layers}"
        )
    return per_rank if per_rank is not None and per_rank > 1 else None
