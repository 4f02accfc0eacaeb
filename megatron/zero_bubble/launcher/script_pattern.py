"""Gives a script's `HybridModel` the layers of each stage, which megatron-core reads from the `|`s of its pattern."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core import parallel_state

from megatron.zero_bubble.job.hybrid_pattern import HybridPattern
from megatron.zero_bubble.job.layers import spread_layers
from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.mistakes import LauncherError
from megatron.zero_bubble.planner.registry import ENTRIES
from megatron.zero_bubble.schedule import Placement

_NAMES = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments that hold a pattern: Megatron-LM's, and its older name, which it copies to the other."""
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def divide_pattern(script: Namespace, flags: LaunchFlags) -> None:
    """Put `|`s into the pattern of unvalidated arguments where Megatron-LM would not divide it as the schedule needs.

    It divides a pattern without `|` into one chunk a rank, all with the same number of layers.

    Raises:
        LauncherError: further arguments say how many layers a rank has.
    """
    entry = ENTRIES.get(flags.zero_bubble_schedule or "")
    num_chunks = 1 if entry is None else entry.num_chunks
    if not hasattr(script, _NAMES[0]) or not (num_chunks > 1 or flags.allow_padding_num_layers):
        return
    for name in _NAMES:
        if not (text := getattr(script, name, None)) or (pattern := HybridPattern.parse(text)).is_divided:
            continue
        if any(getattr(script, end, None) is not None for end in _ENDS):
            raise LauncherError(
                f"--hybrid-layer-pattern {text}: with {num_chunks} model chunks a rank its | say which layers a stage "
                "has: leave out --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
            )
        num_stages = script.pipeline_model_parallel_size * num_chunks
        setattr(script, name, str(pattern.divided(spread_layers(len(pattern.symbols), num_stages))))


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
