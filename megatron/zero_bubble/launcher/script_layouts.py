"""Gives a script's models the layers of each stage, whichever way the script asks megatron-core to spread them."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.mcore.placed_layout import PlacedLayout
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern


class ScriptLayouts:
    """Hooks that put the layout of a partition into the configurations of the pipeline's models.

    Args:
        layout: the layers of each stage, in model order, in megatron-core's notation.
    """

    def __init__(self, placement: Placement, layout: str) -> None:
        self._placement, self._layout = placement, layout

    def configure_new(self, call: Call) -> None:
        """Hook around `TransformerConfig.__post_init__`."""
        config = call["self"]
        if self._is_to_place(config):
            # megatron-core's other ways to spread layers over ranks are in this layout already.
            config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
            config.account_for_embedding_in_pipeline_split = config.account_for_loss_in_pipeline_split = False
            config.pipeline_model_parallel_layout = self._layout
        call.proceed()
        self.place(config)

    def configure(self, call: Call) -> Any:
        """Hook around functions that read a layout: a configuration may be older than the process groups."""
        self.place(call["config"])
        return call.proceed()

    def place(self, config: Any) -> None:
        """Give `config` the layout, unless it has it already or is not one of the pipeline's models."""
        if self._is_to_place(config):
            rank = parallel_state.get_pipeline_model_parallel_rank()
            config.pipeline_model_parallel_layout = PlacedLayout(self._layout, self._placement, rank)

    def _is_to_place(self, config: Any) -> bool:
        is_placed = isinstance(config.pipeline_model_parallel_layout, PlacedLayout)
        return config.pipeline_model_parallel_size == self._placement.num_ranks and not is_placed


class ScriptPattern:
    """Hooks for a pattern with `|`, which put its stages where the placement has them."""

    def __init__(self, placement: Placement, pattern: HybridPattern) -> None:
        self._placement, self._pattern = placement, pattern

    def place(self, call: Call) -> None:
        """Give the pattern to the chunk that a call of `HybridModel`'s constructor builds."""
        call["hybrid_layer_pattern"], call["hybrid_override_pattern"] = str(self._pattern), None
        config = call["config"]
        config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None

    def select(self, call: Call) -> Any:
        """Return the symbols of a chunk's stage, and the number of layers before it; see `select_pipeline_segment`."""
        stage = self._placement.stage_of(parallel_state.get_pipeline_model_parallel_rank(), call["vp_stage"] or 0)
        return list(self._pattern.stages[stage]), sum(self._pattern.partition[:stage])
