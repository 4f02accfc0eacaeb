"""Decides how many layers each stage gets, and writes uneven numbers as a layout of megatron-core."""

from __future__ import annotations

import re

from megatron.zero_bubble.job.job_flags import JobFlags
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.schedule.errors import one_line

_REPEATS = 1000
"""Repeats that a layout may have even with fewer layers, for example of stages without a layer."""


def layout_of_layers(flags: JobFlags, placement: Placement) -> str | None:
    """The layout of the model's layers: the given one, or the one that other flags ask for.

    None if all stages get the same number, or if flags give the first and the last rank their own numbers.

    Raises:
        ValueError: flags contradict each other, or the placement; the message names them.
    """
    given = flags.pipeline_model_parallel_layout
    uneven = given is not None or bool(_layers_of_ends(flags))
    # megatron-core reads a layout by the process's own rank, not by the stage that it builds.
    if placement.kind == "v" and uneven:
        raise ValueError(
            f"--zero-bubble-schedule {flags.schedule} places layers in a V of equal stages: give no layout"
        )
    if placement.kind == "v" and flags.mtp_num_layers is not None:
        raise ValueError(
            f"--zero-bubble-schedule {flags.schedule} places layers in a V, which ends on the first rank, and "
            "megatron-core puts the layers of --mtp-num-layers on the last: choose a schedule that is not a V"
        )
    if not uneven:
        return spread_layout(flags, placement)
    check_given_layers(flags, placement)
    return given


def spread_layout(flags: JobFlags, placement: Placement) -> str | None:
    """The layout that spreads the layers as the flags ask; None if all stages get the same number.

    Raises:
        ValueError: the stages do not divide the layers, and no flag allows uneven stages.
    """
    stages, layers = placement.num_stages, flags.num_layers
    split = f"{stages} stages that --pipeline-model-parallel-size {placement.num_ranks} and {placement.num_chunks} "
    split += "model chunks a rank give"
    embedding, loss = flags.account_for_embedding_in_pipeline_split, flags.account_for_loss_in_pipeline_split
    if embedding or loss:
        if placement.kind == "v":
            raise ValueError(
                f"--zero-bubble-schedule {flags.schedule} places layers in a V of equal stages: give neither "
                "--account-for-embedding-in-pipeline-split nor --account-for-loss-in-pipeline-split"
            )
        counted = layers + embedding + loss
        if counted % stages != 0:
            raise ValueError(
                f"--num-layers {layers} and, by --account-for-embedding-in-pipeline-split and "
                f"--account-for-loss-in-pipeline-split, {embedding + loss} more are not a multiple of the {split}"
            )
        layout = spread_with_ends(counted // stages, stages, embedding=embedding, loss=loss)
        return to_layout(layout, flags.mtp_num_layers)
    if layers % stages == 0:
        return None
    can_be_uneven = placement.kind != "v"
    if not (flags.allow_padding_num_layers and can_be_uneven):
        hint = "; --allow-padding-num-layers spreads them unevenly" if can_be_uneven else ""
        raise ValueError(f"--num-layers {layers} is not a multiple of the {split}{hint}")
    return to_layout(spread_layers(layers, stages), flags.mtp_num_layers)


def check_given_layers(flags: JobFlags, placement: Placement) -> None:
    """Refuse a given layout, or numbers for the first and the last rank, that do not add up to `--num-layers`.

    megatron-core would build them as given, which may be a model of another size.

    Raises:
        ValueError: flags contradict each other; the message names them.
    """
    layout = flags.pipeline_model_parallel_layout
    ends = [*_layers_of_ends(flags)]
    given = [*ends, *([f"--pipeline-model-parallel-layout {layout}"] if layout is not None else [])]
    if flags.account_for_embedding_in_pipeline_split or flags.account_for_loss_in_pipeline_split:
        given.append("--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split")
    if layout is None and given == ends:
        _check_ends(flags, placement)
    elif len(given) > 1:
        raise ValueError(f"{given[0]} and {given[-1]} both say how many layers a stage has: give one of them")
    elif layout is not None and (found := sum(layers_of_layout(layout, placement.num_ranks))) != flags.num_layers:
        raise ValueError(f"{given[0]} has {found} layers, but --num-layers is {flags.num_layers}")


def _layers_of_ends(flags: JobFlags) -> dict[str, int]:
    """The layers that flags give to the first and the last rank; each key is a flag with its value."""
    first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
    ends = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    return {f"{flag} {value}": value for flag, value in ends.items() if value is not None}


def _check_ends(flags: JobFlags, placement: Placement) -> None:
    ends = _layers_of_ends(flags)
    given = " and ".join(ends)
    rest, ranks = flags.num_layers - sum(ends.values()), placement.num_ranks - len(ends)
    fits = rest > 0 and rest % ranks == 0 if ranks > 0 else rest == ranks == 0
    if not fits:
        raise ValueError(
            f"of --num-layers {flags.num_layers}, {given} leaves {rest} for {ranks} other pipeline ranks: "
            "each needs the same number of layers, at least one"
        )
    layers = [*ends.values(), *([rest // ranks] if ranks > 0 else [])]
    if any(number % placement.num_chunks for number in layers):
        raise ValueError(
            f"{given}: pipeline ranks with {', '.join(map(str, layers))} layers cannot be cut into "
            f"{placement.num_chunks} even model chunks each"
        )


def spread_with_ends(per_stage: int, num_stages: int, *, embedding: bool, loss: bool) -> list[int]:
    """Layers of each stage when the embedding and the loss each take the place of one layer."""
    layers = [per_stage] * num_stages
    layers[0] -= embedding
    layers[-1] -= loss
    return layers


def spread_layers(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage, as even as possible.

    The stages at the ends have other work: the last stage, with the loss, is the first to get fewer layers, next is
    the first stage, with the embedding, then the others from the end.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"--num-layers {num_layers} is not enough for {num_stages} stages of at least one layer")
    few, num_more = divmod(num_layers, num_stages)
    by_load = [*range(1, num_stages - 1), *([0] if num_stages > 1 else []), num_stages - 1]
    more = set(by_load[:num_more])
    return [few + (stage in more) for stage in range(num_stages)]


def to_layout(layers: list[int], num_further_tokens: int | None = None) -> str:
    """The layers of each stage in the notation of megatron-core's `--pipeline-model-parallel-layout`.

    `num_further_tokens` multi-token prediction layers join the last stage.
    """
    further = "m" * (num_further_tokens or 0)
    return f"E{'|'.join(f't*{count}' if count else '' for count in layers)}{further}L"


def layers_of_layout(layout: str, num_ranks: int) -> list[int]:
    """The number of layers of each stage in a layout of megatron-core, in model order."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    rows = PipelineParallelLayerLayout(layout, num_ranks).layout
    return [row[chunk].count(LayerType.decoder) for chunk in range(len(rows[0])) for row in rows]


def chunks_of_flags(flags: JobFlags) -> int | None:
    """Model chunks a rank if Megatron's flags ask for several, else None.

    Raises:
        ValueError: the flags contradict each other or do not divide the layers.
    """
    per_rank, per_chunk = flags.num_virtual_stages_per_pipeline_rank, flags.num_layers_per_virtual_pipeline_stage
    if per_rank is not None and per_chunk is not None:
        raise ValueError(
            "give --num-virtual-stages-per-pipeline-rank or --num-layers-per-virtual-pipeline-stage, not both"
        )
    pipeline = flags.pipeline_model_parallel_size
    if flags.pipeline_model_parallel_layout is not None:
        return _chunks_of_layout(flags)
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
    # The embedding and the loss may have a stage each to themselves.
    if per_rank is not None and per_rank * pipeline > flags.num_layers + 2:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {per_rank} x --pipeline-model-parallel-size {pipeline} are more "
            f"stages than --num-layers {flags.num_layers}"
        )
    return per_rank if per_rank is not None and per_rank > 1 else None


def _chunks_of_layout(flags: JobFlags) -> int | None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout, pipeline = flags.pipeline_model_parallel_layout, flags.pipeline_model_parallel_size
    assert layout is not None
    most = max(flags.num_layers, _REPEATS)
    for repeats in re.findall(r"\*(\d+)", layout):
        # megatron-core expands repeats, so a huge number would fill the memory.
        if len(repeats) > len(str(most)) or int(repeats) > most:
            raise ValueError(
                f"--pipeline-model-parallel-layout {layout} repeats something {repeats} times, but --num-layers is "
                f"{flags.num_layers}"
            )
    try:
        parsed = PipelineParallelLayerLayout(layout, pipeline)
    except (AssertionError, ValueError, KeyError) as error:
        reason = one_line(error)
        raise ValueError(f"--pipeline-model-parallel-layout {layout}: megatron-core refuses it: {reason}") from error
    chunks = parsed.virtual_pipeline_model_parallel_size
    return chunks if chunks > 1 else None
