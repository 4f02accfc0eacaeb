"""Gives a script's `HybridModel` the layers of each stage, which megatron-core reads from the `|`s of its pattern."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from megatron.zero_bubble.job.hybrid_pattern import HybridPattern
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.schedule import Placement


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
