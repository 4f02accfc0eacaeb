"""`--allow-padding-num-layers`: a number of layers that the stages do not divide."""

from __future__ import annotations


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


def to_layout(layers: list[int]) -> str:
    """The stages in megatron-core's notation of `--pipeline-model-parallel-layout`."""
    return f"E{'|'.join(f't*{count}' for count in layers)}L"


def layers_of_layout(layout: str, num_ranks: int) -> list[int]:
    """The number of layers of each stage, in model order."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    rows = PipelineParallelLayerLayout(layout, num_ranks).layout
    return [row[chunk].count(LayerType.decoder) for chunk in range(len(rows[0])) for row in rows]
