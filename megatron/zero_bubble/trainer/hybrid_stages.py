"""Builds stages of a hybrid model; `--hybrid-layer-pattern` describes each layer of the model with one symbol."""

from __future__ import annotations

import copy
import importlib
from typing import Any

from megatron.core import __version__ as core_version
from megatron.core.transformer import ModuleSpec, TransformerConfig

from megatron.zero_bubble.mcore.attention import core_attention
from megatron.zero_bubble.mcore.decoder_models import (
    ALLOCATION_MODULE,
    HYBRID,
    HYBRID_RECOMPUTES,
    HYBRID_TAKES_STAGES,
    STACK_MODULE,
)
from megatron.zero_bubble.mcore.hybrid_spec import (
    HAS_FURTHER,
    LOCAL_LAYERS,
    local_layers,
    local_spec,
    transformer_engine_spec,
)
from megatron.zero_bubble.mcore.placement import StagePosition
from megatron.zero_bubble.mcore.replaced import replaced
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.hybrid_pattern import HybridPattern
from megatron.zero_bubble.trainer.arguments import TORCH_BACKENDS, Arguments


def check_pattern(args: Arguments) -> None:
    """Refuse an invalid layer pattern of a hybrid model, and flags that contradict the pattern.

    Raises:
        ValueError: the pattern has an unknown layer, the pattern's parts after a `/` differ, or a flag contradicts the
            pattern.
    """
    pattern = args.pattern
    if pattern is None:
        return
    given = f"--hybrid-layer-pattern {pattern}"
    _check_symbols(given, pattern)
    if args.num_layers != len(pattern.symbols):
        raise ValueError(f"{given} has {len(pattern.symbols)} layers, but --num-layers is {args.num_layers}")
    for symbol, name in (("E", "num_experts"), ("+", "multi_latent_attention")):
        if (symbol in pattern.symbols + pattern.further) is not bool(getattr(args, name)):
            raise ValueError(f"{given}: give {flag_name(name)} if it has a layer {symbol}, and only then")
    if (args.mtp_num_layers or 0) != pattern.num_further:
        raise ValueError(
            f"{given} has {pattern.num_further} layers of multi-token prediction, but --mtp-num-layers is "
            f"{args.mtp_num_layers}: leave this flag out, because the parts of the pattern after / give these layers"
        )
    for name in ("use_rope_scaling", "apply_query_key_layer_scaling"):
        if getattr(args, name, None):
            raise ValueError(f"{given} does not work with {flag_name(name)} in this trainer")
    if args.context_parallel_size > 1:
        raise ValueError(f"{given} does not work with --context-parallel-size {args.context_parallel_size}")
    if (args.recompute_granularity == "full" or args.zero_bubble_recompute) and not HYBRID_RECOMPUTES:
        raise ValueError(
            f"{given}: {HYBRID.__name__} of this megatron-core does not recompute its layers: leave out "
            "--recompute-granularity full and --zero-bubble-recompute"
        )


def _check_symbols(given: str, pattern: HybridPattern) -> None:
    """Refuse a pattern with layers that the installed megatron-core or the trainer does not support."""
    known = local_layers()
    for symbol in pattern.symbols + pattern.further.replace("/", ""):
        if symbol not in known:
            words = LOCAL_LAYERS.get(symbol, ("", ""))[1]
            reason = f"megatron-core {core_version} has no layer {symbol} ({words})" if words else f"no layer {symbol}"
            raise ValueError(f"{given}: {reason}; there are {', '.join(f'{s} ({name})' for s, name in known.items())}")
    if pattern.further and not HAS_FURTHER:
        raise ValueError(
            f"{given}: hybrid models of megatron-core {core_version} have no multi-token prediction, which 0.17 and "
            "later versions have: leave out the part of the pattern that begins with /"
        )
    further = pattern.further.split("/")[1:]
    if pattern.further and (not all(further) or len(set(further)) > 1):
        raise ValueError(f"{given}: the parts that follow a / must be the same symbols, at least one")


def build_hybrid_stage(
    args: Arguments, vp_stage: int | None, symbols: str, first_layer: int, described: dict[str, Any]
) -> Any:
    """Build one stage of a hybrid model, at any position of the pipeline.

    Args:
        symbols: the symbols of the stage's layers.
        first_layer: number of layers in earlier stages.
        described: constructor arguments that GPT models and hybrid models both take.
    """
    config: TransformerConfig = described["config"]
    if config.transformer_impl == "local":
        spec = local_spec(core_attention(config, uses_torch=args.attention_backend in TORCH_BACKENDS))
    else:
        spec = transformer_engine_spec()
    assert args.pattern is not None
    further = args.pattern.further if described["post_process"] else ""
    if HYBRID_TAKES_STAGES:
        name = ("hybrid" if HYBRID_RECOMPUTES else "mamba") + "_stack_spec"
        described = {**described, name: spec, "hybrid_layer_pattern": symbols + further, "vp_stage": vp_stage}
        allocation, models = map(importlib.import_module, (ALLOCATION_MODULE, HYBRID.__module__))
        with (
            # Build the layers of this stage, and any layers of multi-token prediction in its part of the pattern.
            replaced(allocation, "select_pipeline_segment", lambda *args, **kwargs: (list(symbols), first_layer)),
            replaced(models, "mtp_on_this_rank", lambda *args, **kwargs: True),
        ):
            model = HYBRID(**described)
    else:
        stack = ModuleSpec(module=_stage_stack(), params={"first_layer": first_layer}, submodules=spec.submodules)
        described = {**described, "mamba_stack_spec": stack, "hybrid_override_pattern": symbols}
        model = _chunk_class(vp_stage)(**described)
    model.vp_stage, model.mtp_process = vp_stage, bool(further)
    return model


def _chunk_class(vp_stage: int | None) -> Any:
    """Return a subclass of the hybrid model that sets `vp_stage` in the constructor, for megatron-core before 0.17."""

    class ModelChunk(HYBRID):
        def setup_embeddings_and_output_layer(self) -> None:
            self.vp_stage = vp_stage
            super().setup_embeddings_and_output_layer()

    return ModelChunk


def _stage_stack() -> Any:
    """Return a class that builds the layers of one stage of a hybrid model, for megatron-core before 0.17.

    megatron-core's `MambaStack` can build only stages with equal numbers of layers, and only one model chunk on each
    rank. Therefore the returned class builds the layers with the configuration of a pipeline with one stage.
    """
    base: Any = importlib.import_module(STACK_MODULE).MambaStack

    class StageStack(base):
        def __init__(
            self, config: TransformerConfig, *args: Any, pg_collection: Any, first_layer: int, **kwargs: Any
        ) -> None:
            own, groups = copy.copy(config), copy.copy(pg_collection)
            own.num_layers, own.pipeline_model_parallel_size = len(kwargs["hybrid_override_pattern"]), 1
            own.virtual_pipeline_model_parallel_size = own.pipeline_model_parallel_layout = None
            groups.pp = StagePosition(0, 1)
            super().__init__(own, *args, pg_collection=groups, **kwargs)
            for module in self.modules():
                if getattr(module, "config", None) is own:
                    module.config = config
                if isinstance(getattr(module, "layer_number", None), int):
                    module.layer_number += first_layer

    return StageStack
