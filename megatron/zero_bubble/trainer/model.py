"""Builds stages of megatron-core's GPT and hybrid models, and units (embedding, layer or output), from the flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron.zero_bubble.mcore.decoder_models import HYBRID_TAKES_STAGES
from megatron.zero_bubble.mcore.layer_spec import block_spec, layer_specs, multi_token_spec
from megatron.zero_bubble.mcore.linear import fuses_accumulation
from megatron.zero_bubble.mcore.model_units import Unit, keep_unit
from megatron.zero_bubble.mcore.placement import chunk_groups, copy_tied_embedding, place_layout
from megatron.zero_bubble.mcore.transformer_engine import defer_weight_gradients
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.flags import flag_name
from megatron.zero_bubble.session.job_flags import keeping_everything
from megatron.zero_bubble.session.session import Session
from megatron.zero_bubble.trainer.activations import activation_fields, fuses_activation
from megatron.zero_bubble.trainer.arguments import TORCH_BACKENDS, Arguments
from megatron.zero_bubble.trainer.core_errors import as_users_mistake
from megatron.zero_bubble.trainer.core_flags import config_values
from megatron.zero_bubble.trainer.hybrid_stages import build_hybrid_stage
from megatron.zero_bubble.trainer.optimization import in_mixed_precision, parameter_dtype, wrap_in_ddp


@as_users_mistake("this model", AssertionError, ValueError)
def transformer_config(args: Arguments, num_chunks: int, timers: Any) -> TransformerConfig:
    """Make megatron-core's model configuration from the flags and from the trainer's own settings.

    Raises:
        ValueError: megatron-core refuses the configuration.
    """
    config_class = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = config_values(args, config_class)
    if args.transformer_impl == "local":
        del values["attention_backend"]  # only Transformer Engine's attention reads this field
    if args.variable_seq_lengths and not args.num_experts:
        values.update(moe_token_dispatcher_type="alltoall")  # the default dispatcher refuses variable lengths
    dtype = parameter_dtype(args)
    values.update(
        **activation_fields(args),
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        # The fusion of bias and dropout is a CUDA kernel; on a CPU, its compilation takes minutes and saves no time.
        # With the fusion, megatron-core's grouped experts refuse biases.
        bias_dropout_fusion=torch.cuda.is_available() and (args.disable_bias_linear or not args.moe_grouped_gemm),
        masked_softmax_fusion=False,
        bias_activation_fusion=fuses_activation(args),
        persist_layer_norm=False,
        gradient_accumulation_fusion=fuses_accumulation()
        and not (args.no_gradient_accumulation_fusion or args.use_torch_fsdp2),
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
        timers=timers,
        is_hybrid_model=args.hybrid_layer_pattern is not None,  # changes the initial weights
    )
    return config_class(**values)


def build_model(
    args: Arguments, config: TransformerConfig, session: Session, rank: int | None = None
) -> list[torch.nn.Module]:
    """Build the model chunks of a pipeline rank, wrapped in DDP or FSDP.

    Args:
        rank: the pipeline rank; by default this process's rank. A process can also build the chunks of another rank.

    Raises:
        ValueError: megatron-core refuses the model, or the vocabulary cannot be cut into shards.
    """
    if rank is None:
        rank = parallel_state.get_pipeline_model_parallel_rank()
    placement = session.job.placement
    session.configure(config)
    if session.store is not None and args.transformer_impl == "transformer_engine":
        defer_weight_gradients(config)
    place_layout(config, placement, rank)
    chunks: list[torch.nn.Module] = []
    stages = None if args.pattern is None else args.pattern.divided(session.job.partition)
    for chunk, stage in enumerate(placement.stages_of(rank)):
        vp_stage = chunk if placement.num_chunks > 1 else None
        symbols, first_layer = (None, 0) if stages is None else (stages.stages[stage], sum(stages.partition[:stage]))
        # From megatron-core 0.17 on, hybrid models number their layers themselves.
        numbered_from = 0 if HYBRID_TAKES_STAGES else first_layer
        ends = {"embeds": stage == 0, "is_last": stage == placement.num_stages - 1}
        with session.initializing(is_first_stage=stage == 0, first_layer=numbered_from):
            groups = chunk_groups(placement, rank, chunk)
            chunks.append(build_stage(args, config, groups, vp_stage, **ends, symbols=symbols, first_layer=first_layer))
    copy_tied_embedding(chunks)
    session.shard(chunks, args.padded_vocab_size)
    chunks = in_mixed_precision(args, config, chunks)
    session.split(chunks)
    wrapped = wrap_in_ddp(args, config, chunks, defers_weights=session.store is not None)
    for chunk in wrapped:
        chunk.broadcast_params()
    no_sync_funcs = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_sync_funcs if len(wrapped) > 1 else no_sync_funcs[0]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


@as_users_mistake("this model", AssertionError, ValueError, ImportError, NotImplementedError)
def build_stage(
    args: Arguments,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    vp_stage: int | None,
    *,
    embeds: bool,
    is_last: bool,
    symbols: str | None = None,
    first_layer: int = 0,
) -> Any:
    """Build one stage of the model on this rank's device, without DDP and without a split of the backward into B and W.

    Args:
        embeds: whether the stage begins with the embedding.
        is_last: whether the stage ends with the output layer.
        symbols: the symbols of the stage's layers in a hybrid model, None in a GPT model.
        first_layer: number of layers in earlier stages.

    Raises:
        ValueError: megatron-core refuses the model.
    """
    described: dict[str, Any] = {
        "config": config,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": embeds,
        "post_process": is_last,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "pg_collection": groups,
    }
    if symbols is not None:
        model = build_hybrid_stage(args, vp_stage, symbols, first_layer, described)
    else:
        layers = layer_specs(config, uses_torch_attention=args.attention_backend in TORCH_BACKENDS)
        model = GPTModel(
            transformer_layer_spec=block_spec(config, layers, vp_stage, groups.pp.rank()),
            mtp_block_spec=multi_token_spec(config, layers[-1], vp_stage, is_last_stage=is_last),
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            vp_stage=vp_stage,
            **described,
        )
    if model.mtp_process and not embeds and model.share_embeddings_and_output_weights:
        # The output layer uses the stage's copy of the embedding; megatron-core neither uses nor saves its own weight.
        model.output_layer.weight = None
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model.cuda(torch.cuda.current_device())


_PATTERNS = {
    "moe_layer_freq": lambda layer, every: int(layer % every == 0),
    "window_attn_skip_freq": lambda layer, every: int((layer + 1) % every != 0),
    "no_rope_freq": lambda layer, every: int((layer + 1) % every == 0),
}
"""Flag -> function of (index of a layer, number) that returns the layer's value. Each flag takes a list with one value
for each layer, or a number that the function converts to these values."""


def layer_kinds(args: Arguments) -> list[int]:
    """Return the index of each layer's kind; the first layer has kind 0, and each new kind gets the next index."""
    layers = _differences(args)
    distinct = list(dict.fromkeys(layers))
    return [distinct.index(layer) for layer in layers]


def _differences(args: Arguments) -> list[tuple[int | str, ...]]:
    """Return, for each layer, the symbol in a hybrid model, or the values of `_values_of_layers` in a GPT model.

    Raises:
        ValueError: the list that a flag gives does not have one entry for each layer.
    """
    if args.pattern is not None:
        return list(zip(args.pattern.symbols))
    return list(zip(*_values_of_layers(args).values(), strict=True)) or [()] * args.num_layers


def _values_of_layers(args: Arguments) -> dict[str, list[Any]]:
    """Return the flags that give each layer of a GPT model a value of its own, with these values."""
    given: dict[str, Any] = {name: getattr(args, name) for name in _PATTERNS}
    if args.context_parallel_size > 1 and len(args.cp_comm_type or ()) > 1:
        given["cp_comm_type"] = args.cp_comm_type
    values = {}
    for name, value in given.items():
        if isinstance(value, int):
            value = [_PATTERNS[name](layer, value) for layer in range(args.num_layers)]
        elif value is not None and len(value) != args.num_layers:
            raise ValueError(f"{flag_name(name)} has {len(value)} layers, but --num-layers is {args.num_layers}")
        if value is not None:
            values[name] = list(value)
    return values


def build_unit(args: Arguments, config: TransformerConfig, unit: Unit) -> Any:
    """Build a unit (embedding, layer or output) as a pipeline of one stage; `config` comes from `unit_config`.

    Raises:
        ValueError: megatron-core refuses the model.
    """
    groups = chunk_groups(Placement("linear", 1), 0, 0)
    kinds = None if args.pattern is None else "".join(dict.fromkeys(args.pattern.symbols))
    model = build_stage(args, config, groups, None, embeds=unit.embeds, is_last=unit.is_last, symbols=kinds)
    keep_unit(model, unit)
    return model


def unit_config(args: Arguments, unit: Unit) -> TransformerConfig:
    """Return the configuration of a one-stage model with one layer of each kind and without full recomputation."""
    kinds = list(dict.fromkeys(_differences(args)))
    patterns: dict[str, Any] = {}
    if args.hybrid_layer_pattern is None:
        patterns = dict(zip(_values_of_layers(args), map(list, zip(*kinds, strict=True)), strict=True))
        if words := patterns.get("cp_comm_type"):
            patterns["cp_comm_type"] = words[unit.layer or 0]  # megatron-core 0.16 fails to read a list
    of_units: dict[str, Any] = {
        "num_layers": len(kinds),
        "mtp_num_layers": args.mtp_num_layers if unit.is_last else None,
        "pipeline_model_parallel_size": 1,
        "pipeline_model_parallel_layout": None,
    }
    return transformer_config(replace(args, **of_units, **patterns, **keeping_everything(args)), 1, None)
