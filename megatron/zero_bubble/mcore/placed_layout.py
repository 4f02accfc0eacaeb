"""Makes megatron-core read a pipeline layout by our placement of stages, such as a V.

megatron-core asks a layout for the layers of a rank and a chunk (`vp_stage`), and numbers stages rank by rank: chunk
`c` of rank `r` is stage `c * p + r`. In a V, the chunk holds another stage than this one.
"""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zero_bubble.schedule import Placement


class PlacedLayout(PipelineParallelLayerLayout):
    """A layout that gives each rank and chunk the layers of the stage that the placement puts there.

    Args:
        stages: the layers of each stage, in model order, in one of megatron-core's notations.
        rank: the pipeline rank that asks, which need not be this process's.
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
    """Make the layout of `config`, if it has one, that of pipeline rank `rank` under our placement."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        config.pipeline_model_parallel_layout = PlacedLayout(layout.input_data, placement, rank)
