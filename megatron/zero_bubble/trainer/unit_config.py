"""Says which layers of a model are alike, and builds the units of a model with one layer of each kind."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.mcore.model_units import Unit, keep_unit
from megatron.zero_bubble.mcore.placement import chunk_groups
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.session.job_flags import keeping_everything
from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.model import build_stage, transformer_config

_PATTERNS = {
    "moe_layer_freq": lambda layer, every: int(layer % every == 0),
    "window_attn_skip_freq": lambda layer, every: int((layer + 1) % every != 0),
    "no_rope_freq": lambda layer, every: int((layer + 1) % every == 0),
}
"""Flags by which layers differ, with the meaning of a number in the place of a list."""


def layer_kinds(args: Arguments) -> list[int]:
    """The kind of every layer, by number, in the order in which kinds first occur."""
    distinct = list(dict.fromkeys(_differences(args)))
    return [distinct.index(layer) for layer in _differences(args)]


def _differences(args: Arguments) -> list[tuple[int | str, ...]]:
    """For every layer its symbol in a hybrid model, and otherwise the values of the flags in `_PATTERNS`.

    Raises:
        ValueError: a list of a flag has another length than the model.
    """
    if args.hybrid_layer_pattern is not None:
        return list(zip(HybridPattern.parse(args.hybrid_layer_pattern).symbols))
    columns = []
    for name, meaning in _PATTERNS.items():
        value = getattr(args, name)
        if isinstance(value, int):
            value = [meaning(layer, value) for layer in range(args.num_layers)]
        elif value is not None and len(value) != args.num_layers:
            raise ValueError(f"{flag_name(name)} has {len(value)} layers, but --num-layers is {args.num_layers}")
        columns.append(value or [0] * args.num_layers)
    return list(zip(*columns, strict=True))


def build_unit(args: Arguments, config: TransformerConfig, unit: Unit) -> Any:
    """A unit as a stage of one pipeline rank, with the configuration `unit_config`.

    Raises:
        ValueError: megatron-core refuses the model.
    """
    groups = chunk_groups(Placement("linear", 1), 0, 0)
    kinds = None
    if args.hybrid_layer_pattern is not None:
        kinds = "".join(dict.fromkeys(HybridPattern.parse(args.hybrid_layer_pattern).symbols))
    model = build_stage(args, config, groups, None, embeds=unit.embeds, is_last=unit.is_last, symbols=kinds)
    keep_unit(model, unit)
    return model


def unit_config(args: Arguments, unit: Unit) -> TransformerConfig:
    """The model's configuration with a layer of each kind, for one pipeline rank, without full recomputation."""
    kinds = list(dict.fromkeys(_differences(args)))
    patterns = {}
    if args.hybrid_layer_pattern is None:
        patterns = {
            name: list(column)
            for name, column in zip(_PATTERNS, zip(*kinds, strict=True), strict=True)
            if getattr(args, name) is not None
        }
    of_units = {
        "num_layers": len(kinds),
        "mtp_num_layers": args.mtp_num_layers if unit.is_last else None,
        "pipeline_model_parallel_size": 1,
        "pipeline_model_parallel_layout": None,
    }
    unit_args = args.changed({**of_units, **patterns, **keeping_everything(args)})
    return transformer_config(unit_args, 1, None)
