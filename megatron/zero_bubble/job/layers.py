"""How many layers each stage gets: where they are not all alike, the layout that says so."""

from __future__ import annotations

from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.training.arguments import Arguments


def choose_layout(args: Arguments, placement: Placement) -> str | None:
    """The layout that spreads the layers as the flags ask; None where all stages get as many.

    Raises:
        ValueError: the stages do not divide the layers, and no flag says what to do about it.
    """
    stages, layers = placement.num_stages, args.num_layers
    split = f"{stages} stages that --pipeline-model-parallel-size {placement.num_ranks} and {placement.num_chunks} "
    split += "model chunks a rank give"
    embedding, loss = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    if embedding or loss:
        if placement.kind == "v":
            raise ValueError(
                f"--zero-bubble-schedule {args.schedule} places layers in a V, in even stages: no "
                "--account-for-embedding-in-pipeline-split, no --account-for-loss-in-pipeline-split"
            )
        counted = layers + embedding + loss
        if counted % stages != 0:
            raise ValueError(
                f"--num-layers {layers} and, by --account-for-embedding-in-pipeline-split and "
                f"--account-for-loss-in-pipeline-split, {embedding + loss} more are not a multiple of the {split}"
            )
        layout = spread_with_ends(counted // stages, stages, embedding=embedding, loss=loss)
        return to_layout(layout, args.mtp_num_layers)
    if layers % stages == 0:
        return None
    can_be_uneven = placement.kind != "v"
    if not (args.allow_padding_num_layers and can_be_uneven):
        hint = "; --allow-padding-num-layers spreads them unevenly" if can_be_uneven else ""
        raise ValueError(f"--num-layers {layers} is not a multiple of the {split}{hint}")
    return to_layout(spread_layers(layers, stages), args.mtp_num_layers)


def check_given_layers(args: Arguments, placement: Placement) -> None:
    """Refuse a layout of the user's own, or layers of the first and the last rank, that do not give `--num-layers`.

    megatron-core builds what they say, which may be a model of another size.

    Raises:
        ValueError: which flags contradict each other.
    """
    layout = args.pipeline_model_parallel_layout
    flags = [*_layers_of_ends(args), *([f"--pipeline-model-parallel-layout {layout}"] if layout is not None else [])]
    if args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split:
        flags.append("--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split")
    if layout is None and len(flags) == len(_layers_of_ends(args)):
        _check_ends(args, placement)
    elif len(flags) > 1:
        raise ValueError(f"{flags[0]} and {flags[-1]} both say how many layers a stage has: give one of them")
    elif layout is not None and (given := sum(layers_of_layout(layout, placement.num_ranks))) != args.num_layers:
        raise ValueError(f"{flags[0]} has {given} layers, but --num-layers is {args.num_layers}")


def _layers_of_ends(args: Arguments) -> dict[str, int]:
    """The numbers that are given for the first and the last rank, by their flags."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    ends = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    return {f"{flag} {value}": value for flag, value in ends.items() if value is not None}


def _check_ends(args: Arguments, placement: Placement) -> None:
    ends = _layers_of_ends(args)
    flags = " and ".join(ends)
    rest, ranks = args.num_layers - sum(ends.values()), placement.num_ranks - len(ends)
    fits = rest > 0 and rest % ranks == 0 if ranks > 0 else rest == ranks == 0
    if not fits:
        raise ValueError(
            f"of --num-layers {args.num_layers}, {flags} leaves {rest} for {ranks} other pipeline ranks: "
            "each of them must get one at least, and all as many"
        )
    layers = [*ends.values(), *([rest // ranks] if ranks > 0 else [])]
    if any(number % placement.num_chunks for number in layers):
        raise ValueError(
            f"{flags}: pipeline ranks with {', '.join(map(str, layers))} layers cannot be cut into "
            f"{placement.num_chunks} even model chunks each"
        )


def spread_with_ends(per_stage: int, num_stages: int, *, embedding: bool, loss: bool) -> list[int]:
    """Layers of each stage when the embedding and the loss take the place of one each."""
    layers = [per_stage] * num_stages
    layers[0] -= embedding
    layers[-1] -= loss
    return layers


def spread_layers(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage, as even as possible.

    The ends have other work too: the last stage, with the loss, is the first to get fewer, then the first, with
    the embedding, then the others from the end.

    Raises:
        ValueError: there is not a layer for every stage.
    """
    if num_layers < num_stages:
        raise ValueError(f"--num-layers {num_layers} is not enough for {num_stages} stages of at least one layer")
    few, num_more = divmod(num_layers, num_stages)
    by_load = [*range(1, num_stages - 1), *([0] if num_stages > 1 else []), num_stages - 1]
    more = set(by_load[:num_more])
    return [few + (stage in more) for stage in range(num_stages)]


def to_layout(layers: list[int], num_further_tokens: int | None = None) -> str:
    """The stages in megatron-core's notation of `--pipeline-model-parallel-layout`."""
    further = "m" * (num_further_tokens or 0)
    return f"E{'|'.join(f't*{count}' if count else '' for count in layers)}{further}L"


def layers_of_layout(layout: str, num_ranks: int) -> list[int]:
    """The number of layers of each stage, in model order."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    rows = PipelineParallelLayerLayout(layout, num_ranks).layout
    return [row[chunk].count(LayerType.decoder) for chunk in range(len(rows[0])) for row in rows]
