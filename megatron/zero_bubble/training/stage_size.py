"""Computes the operations and activations of a pipeline stage from Megatron's flags.

All sizes are of one tensor-parallel rank and one microbatch. s is the sequence length, b the microbatch size, h the
hidden size, a the number of attention heads, V the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.zero_bubble.job.model_states import element_bytes
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.attention_size import attention_activations, attention_flops
from megatron.zero_bubble.training.model_size import (
    Linear,
    StageLayers,
    attention_linears,
    mlp_linears,
    rank_tokens,
)


class Flops(NamedTuple):
    """Floating-point operations of one microbatch on a stage; a multiply and an add are two."""

    f: float
    b: float
    """With what selective recomputation computes again."""
    w: float
    r: float = 0.0
    """What full recomputation computes again."""

    @property
    def total(self) -> float:
        return sum(self)


def stage_flops(args: Arguments, stage: StageLayers) -> Flops:
    """Floating-point operations of a stage: F = sbh 24h, B = sbh 24h, W = sbh 24h for a plain layer, and attention's.

    The formulas are from Qi et al. 2024; the logits are added. Attention's products are those that its kernel
    computes: sbh 4s in F and sbh 8s in B for the whole matrix of scores, half of it in a fused kernel with a causal
    mask, whose B computes one product again.
    """
    weights = sum(layer.inputs * layer.outputs for layer in _computed_linears(args))
    linear = 2.0 * rank_tokens(args) * weights
    has_logits = stage.is_last and stage.has_vocabulary
    logits = 2.0 * rank_tokens(args) * args.hidden_size * args.padded_vocab_size if has_logits else 0.0
    layers, t = stage.num_layers, args.tensor_model_parallel_size
    attention_f, attention_b = attention_flops(args)
    again = attention_f if args.recompute_granularity == "selective" else 0.0
    return Flops(
        f=(layers * linear + logits) / t + layers * attention_f,
        b=(layers * linear + logits) / t + layers * (attention_b + again),
        w=(layers * linear + logits) / t,
        r=_recomputed_layers(args, stage) * (linear / t + attention_f),
    )


def _computed_linears(args: Arguments) -> Iterator[Linear]:
    """The linear layers that a token passes in one transformer layer, without routers, as Megatron-LM counts."""
    yield from attention_linears(args)
    for _ in range(1 if args.num_experts is None else args.moe_router_topk):
        yield from mlp_linears(args)


def _recomputed_layers(args: Arguments, stage: StageLayers) -> int:
    """The number of the stage's layers that R computes again, where a microbatch has one."""
    if args.zero_bubble_recompute is not None:
        return stage.num_layers
    if args.recompute_granularity != "full":
        return 0
    if args.recompute_method == "block":
        return min(stage.num_layers, args.recompute_num_layers or 0)
    return stage.num_layers


class Activations(NamedTuple):
    """Bytes of one microbatch on a stage."""

    after_f: float
    """Bytes held from F to B where nothing is recomputed in full."""
    after_b: float
    """Bytes held from B to W: the inputs of the linear layers and the gradients of their outputs."""
    restored: float = 0.0
    """Bytes of `after_f` that F drops and R restores, with full recomputation."""


def stage_activations(args: Arguments, stage: StageLayers) -> Activations:
    """Activation bytes of a stage: M_B = sb (34h + 4a) and M_W = 32 sbh for a plain layer, and logits.

    The formulas (Korthikanti et al. 2022 for M_B, Qi et al. 2024 for M_W) hold in half precision with dropout and
    fused attention. Of other layers every tensor as large as the hidden state is counted.
    """
    size, tokens = element_bytes(args), rank_tokens(args)
    held, held_for_w = _layer_activations(args)
    recomputed = _recomputed_layers(args, stage)
    # Uniform recomputation keeps the input of every unit of layers.
    units = recomputed / (args.recompute_num_layers or 1) if args.recompute_method == "uniform" else recomputed
    restored = recomputed * held - units * size * tokens * args.hidden_size / _sequence_split(args)
    kept = stage.num_layers * held
    for_w = stage.num_layers * held_for_w
    if stage.is_first and args.hidden_dropout > 0:
        kept += tokens * args.hidden_size / _sequence_split(args)
    if stage.is_last and stage.has_vocabulary:
        # Inputs of the norm and of the output layer; logits are kept in fp32 for the loss.
        hidden = tokens * args.hidden_size / _sequence_split(args)
        logits = tokens * args.padded_vocab_size / args.tensor_model_parallel_size
        kept += 2 * size * hidden + 4 * logits
        for_w += size * (hidden + logits)
    return Activations(kept, for_w, restored)


def _layer_activations(args: Arguments) -> tuple[float, float]:
    """Bytes that one layer keeps from F to B, and from B to W."""
    size, tokens = element_bytes(args), rank_tokens(args)
    hidden = size * tokens * args.hidden_size / _sequence_split(args)
    mask = tokens * args.hidden_size / _sequence_split(args) if args.hidden_dropout > 0 else 0.0
    experts = 1 if args.num_experts is None else args.moe_router_topk
    held = 4 * hidden + 2 * mask  # inputs of both norms, of attention and of the MLP; dropout's masks
    held += attention_activations(args)
    held += experts * _mlp_activations(args) / args.tensor_model_parallel_size
    for_w = sum(size * tokens * _kept_for_w(args, one) for one in _computed_linears(args))
    return held, for_w


def _kept_for_w(args: Arguments, linear: Linear) -> float:
    """Elements that a rank keeps for W, for each token: the layer's input and the gradient of its output."""
    t = args.tensor_model_parallel_size
    if linear.splits_inputs:
        return linear.inputs / t + linear.outputs
    return linear.inputs / _sequence_split(args) + linear.outputs / t


def _mlp_activations(args: Arguments) -> float:
    """Bytes kept between an MLP's linear layers: inputs of the activation function and of the second layer.

    A gated MLP also keeps the gate, to which megatron-core adds an offset in a copy, and the activation function's
    output.
    """
    assert args.ffn_hidden_size is not None
    tensors = 5 if args.swiglu else 2
    return float(element_bytes(args) * rank_tokens(args) * args.ffn_hidden_size * tensors)


def _sequence_split(args: Arguments) -> int:
    """Number of ranks that split the activations between linear layers."""
    return args.tensor_model_parallel_size if args.sequence_parallel else 1
